"""A thin, typed client for etcd's v3 API that switches members automatically and never hangs. See decision 18."""
