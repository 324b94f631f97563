/* Outgoing replies. */
#pragma once

#include "store.h"

void reply_bytes(Store *, Conn *, const void *bytes, size_t size); /* at most OUT_ROOM */
void reply_byte(Store *, Conn *, uint8_t byte);
void reply_number(Store *, Conn *, uint64_t number);
void reply_blob(Store *, Conn *, Blob *value);  /* only the bytes */
void reply_value(Store *, Conn *, Blob *value); /* after its length; NULL is empty */
void flush(Store *);
void replies_resume(Store *, Conn *);
void replies_drop(Conn *);
