/* The store as a whole: open, poll for ready connections, close. */
#pragma once

#include "store.h"

int conn_add(Store *, int fd, Text data); /* 0, or the error; then `fd` is not closed */
bool poll_once(Store *, bool may_wait);   /* handle all ready connections once; whether there was work */
int store_open(Store *);   /* -1 and errno on failure */
void store_close(Store *); /* ends all connections */
void store_free(Store *);  /* then frees its content */
