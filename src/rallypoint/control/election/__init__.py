"""The election on etcd: which agent coordinates the job, where its successor continues, and how others find it."""
