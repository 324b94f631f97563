/* Reads input, and serves it in time slices. */
#pragma once

#include "store.h"

void conn_serve(Store *, Conn *, Text data); /* and keep the rest */
void conn_ready(Store *, Conn *, uint32_t events);
void serve_busy(Store *); /* turns for busy connections, for some time */
