/* Bytes come, and are served in time slices. */
#pragma once

#include "store.h"

void conn_serve(Store *, Conn *, Text data); /* and keep what is left of it */
void conn_ready(Store *, Conn *, uint32_t events);
void serve_busy(Store *); /* those who have more to do than one slice, one after the other, for some time */
