"""etcd's v3 API: a thin, typed client that changes members by itself and never hangs. See decision 18."""
