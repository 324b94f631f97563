/* Bytes into commands. */
#pragma once

#include "store.h"

size_t serve(Store *, Conn *, Text data, Refusal *); /* how many bytes were used up */
