"""The election on etcd: chooses the agent that coordinates the job, hands over the state, and announces the address."""
