"""The election on etcd: which agent coordinates the job, where its successor goes on, and how others find it."""
