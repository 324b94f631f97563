/* Who waits for keys. */
#pragma once

#include "store.h"

/* One connection waits for one key. It stands in the key's line, and in its connection's block. */
typedef struct {
    Node line; /* in none once its connection knows that the key has come */
    Slot *slot;
    Waiting *waiting;
    uint64_t times; /* how often the connection named the key */
} Link;

/* What one connection waits for. */
struct Waiting {
    Node node;  /* among those that were cancelled, until they are taken apart */
    Conn *conn; /* NULL once it was cancelled */
    uint64_t missing;
    size_t count, seen; /* links, and of those cancelled how many were taken apart */
    Link links[];
};

bool wait_begin(Store *, Conn *, size_t most); /* no more than so many keys follow; what was waited for is cancelled */
bool wait_for_key(Store *, Conn *, Text key);
void wait_end_of_keys(Store *, Conn *); /* all keys were named */
void wait_cancel(Store *, Conn *);
bool wait_must_pause(const Store *, const Conn *); /* a key may have come that it waits for, and it does not know yet */
bool wait_clear(Store *, size_t steps); /* take apart what was cancelled; whether something is left */
void wake_all(Store *, Conn *, Slot *); /* the connection has changed the key: some at once, others in later polls */
void wake_more(Store *, size_t most);   /* those others: so many replies */
void wake_first(Store *, Slot *);
