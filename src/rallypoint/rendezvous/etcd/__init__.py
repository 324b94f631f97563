"""A control plane that moves: the arbiter lives in an agent, which etcd elects, and its memory lives in etcd."""
