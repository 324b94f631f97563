/* Admission: who may connect, and how many. */
#pragma once

#include "store.h"

bool is_peer(const Store *, int fd);
Reason why_refused(Store *, int fd); /* for a new connection */
void accept_all(Store *);
void accept_again(Store *);
void store_set_peers(Store *, Network *peers, size_t count, bool guarded); /* takes ownership of `peers` */
