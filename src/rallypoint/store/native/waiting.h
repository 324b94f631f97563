/* Waits for keys. */
#pragma once

#include "store.h"

/* One connection's wait for one key, in the key's line and in the connection's block. */
typedef struct {
    Node line; /* in none once its connection knows that the key is set */
    Slot *slot;
    Waiting *waiting;
    uint64_t times; /* how often the connection named the key */
} Link;

/* All waits of one connection. */
struct Waiting {
    Node node;  /* among the cancelled ones, until taken apart */
    Conn *conn; /* NULL once cancelled */
    uint64_t missing;
    size_t count, seen; /* links; after cancellation, the number taken apart */
    Link links[];
};

bool wait_begin(Store *, Conn *, size_t most); /* at most `most` keys follow; cancels an earlier wait */
bool wait_for_key(Store *, Conn *, Text key);
void wait_end_of_keys(Store *, Conn *); /* all keys are named */
void wait_cancel(Store *, Conn *);
bool wait_must_pause(const Store *, const Conn *); /* a key may be set that it waits for, without its knowing */
bool wait_clear(Store *, size_t steps); /* take apart cancelled waits; whether any are left */
void wake_all(Store *, Conn *, Slot *); /* the connection has set the key: some now, others in later polls */
void wake_more(Store *, size_t most);   /* those others: at most `most` replies */
void wake_first(Store *, Slot *);
