/* Parses bytes into commands. */
#pragma once

#include "store.h"

size_t serve(Store *, Conn *, Text data, Refusal *); /* the number of bytes used */
