"""etcd's v3 API: a thin, typed client that switches members automatically and never hangs. See decision 18."""
