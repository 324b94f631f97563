/* Opens and closes connections. */
#pragma once

#include "store.h"

bool conn_open(Store *, int fd); /* false and errno if resources are lacking */
void conn_refuse(Store *, Conn *, const Refusal *); /* report why, send its replies, then close it */
void conn_close(Store *, Conn *);
void conn_input_free(Conn *);
void close_doomed(Store *);
