/* Replies on their way out. */
#pragma once

#include "store.h"

void reply_bytes(Store *, Conn *, const void *bytes, size_t size); /* no more than OUT_ROOM */
void reply_byte(Store *, Conn *, uint8_t byte);
void reply_number(Store *, Conn *, uint64_t number);
void reply_blob(Store *, Conn *, Blob *value);  /* the bytes alone */
void reply_value(Store *, Conn *, Blob *value); /* with its length before it; NULL is empty */
void flush(Store *);
void replies_resume(Store *, Conn *);
void replies_drop(Conn *);
