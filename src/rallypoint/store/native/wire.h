/* The protocol's limits and codes; `wire.py` explains them. */
#pragma once

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "numbers travel with their lowest byte first and are copied as they are"
#endif

enum { MAX_KEY = 8192, MAX_PAYLOAD = 8 * 1024 * 1024, MAX_KEYS = 131072 };
enum { DONE = 0, MISSING = 1, CANCELLED = 1 };
#define MAGIC 0x3C85F7CEu
