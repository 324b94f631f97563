/* The store as a whole: it is opened, looks again and again at what is ready, and is closed. */
#pragma once

#include "store.h"

int conn_add(Store *, int fd, Text data); /* 0, or the error for which it could not be had; then it is not closed */
bool poll_once(Store *, bool may_wait);   /* look once at all that is ready; whether there was anything to do */
int store_open(Store *);   /* -1 and errno if it could not be done */
void store_close(Store *); /* ends all connections */
void store_free(Store *);  /* and then what is stored */
