/* Connections come and go. */
#pragma once

#include "store.h"

bool conn_open(Store *, int fd); /* false and errno if there are no means */
void conn_refuse(Store *, Conn *, const Refusal *); /* say why, send what it is owed, and end it when that was sent */
void conn_close(Store *, Conn *);
void conn_input_free(Conn *);
void close_doomed(Store *);
