/* The data of a store and its connections, and the operations on connections that every file may use: end one later, or
 * request its events again. */
#pragma once

#include "table.h"

#ifndef STORE_SLICE /* for tests: a small value makes many slices */
#define STORE_SLICE 1024
#endif

enum {
    BLOCK = 4 * 1024,      /* bytes of replies to one connection after which its room is checked */
    PIECE = 64 * 1024,     /* most bytes read at once, unless an incomplete request needs more */
    OUT_ROOM = 256 * 1024, /* bytes of small replies waiting to be sent */
    OUT_SEGMENTS = 4096,
    SLICE = STORE_SLICE,   /* steps of one connection before others have their turn: some 100 microseconds */
    STEP = 4096,           /* bytes that count as one step */
};

typedef struct Conn Conn;
typedef struct Store Store;
typedef struct Waiting Waiting; /* `waiting.h` */
typedef struct Listing Listing; /* `listing.h` */

/* Output that the kernel had no room for. */
typedef struct Piece {
    struct Piece *next;
    Blob *blob;
    size_t at, end;
} Piece;

/* The state of a request of many keys. */
typedef enum { NOTHING, CHECKING, LOOKING, ENLISTING, GETTING } Doing;

struct Conn {
    Node all, unvalidated, doomed; /* all; without a greeting; to be closed */
    Node busy; /* with work that no event reports, or held */
    int fd;
    bool greeted;
    bool full;   /* the kernel has no room for replies */
    bool over;   /* it takes no more requests */
    bool failed; /* there was no memory for its replies */
    bool reading_stopped; /* the client no longer reads replies */
    uint64_t since; /* when it connected */

    /* Input that is not yet done. */
    uint8_t *input;
    size_t input_at, input_size, input_room;
    size_t want;       /* the length of the input at which to parse again */
    size_t keys_at;    /* in a request of many keys: the first incomplete key, and the number of keys left */
    uint64_t keys_left;
    uint64_t pairs_left; /* of the MULTI_SET being read */

    Doing doing; /* with a complete request of many keys: its next key, the number left, its end */
    size_t doing_at, doing_end;
    uint64_t doing_left;

    Waiting *waiting;
    Listing *listing;
    uint64_t keys, bytes; /* by how much it has enlarged the table */

    Piece *backlog, *backlog_end;
};

/* Replies to one connection: bytes in the store's `out`, or a value. */
typedef struct {
    Conn *conn;
    Blob *blob;
    size_t at, size;
} Segment;

/* Why a connection is refused; `wire.py` has the sentences. */
typedef enum {
    REFUSE_NOTHING, LONG_KEY, LONG_VALUE, MANY_KEYS, WRONG_MAGIC, NO_GREETING, GREETED_AGAIN, UNKNOWN_OPCODE, NO_NUMBER,
    NO_MEMORY, LONG_REQUEST, GROWN_VALUE, KEYS_OF_ONE, BYTES_OF_ONE, SILENT, NOT_A_PEER, OTHER_USER
} Reason;

typedef struct {
    Reason reason;
    uint64_t number;
    Text first, second;
} Refusal;

/* The limits of a store; `StoreGuard` (transport.py) explains them. */
typedef struct {
    uint64_t retry;    /* nanoseconds without accepting after resources were lacking */
    uint64_t greeting; /* nanoseconds within which a connection must greet; 0 for no limit */
    uint64_t connections, request, value, keys, bytes;
} Limits;

/* A network in the form of IPv6. */
typedef struct {
    uint8_t address[16];
    uint8_t bits;
} Network;

struct Store {
    Table table;
    Limits limits;
    int epoll, listener, wake; /* no listener: -1 */
    int descriptors;           /* this and higher ones are for other uses of this process */
    bool woken;
    bool at_connection_limit; /* it does not accept because there are enough connections */
    uint64_t accept_again_at; /* 0 while it accepts */

    bool guarded; /* only `peers` may connect */
    Network *peers;
    size_t peer_count, host_count; /* the first `host_count` peers are single addresses, in order */

    Node all, unvalidated, busy, doomed; /* rings of connections */
    size_t conn_count;
    Node held;      /* connections that become busy again once `waking` is empty */
    Node waking;    /* links to keys that were set, whose connections do not know yet */
    Node cancelled; /* waits that nobody needs any more */
    Node listings;
    uint64_t listing_number;

    uint8_t *out; /* small replies in order of creation: OUT_ROOM bytes */
    size_t out_size;
    Segment *segments; /* OUT_SEGMENTS of them */
    size_t segment_count;
    Conn *serving;  /* the connection being served; the bytes owed to it, and its steps so far */
    size_t owed, steps;

    uint8_t *intake; /* PIECE bytes */

    void (*refused)(Store *, int fd, const Refusal *); /* reports it */
    /* Nobody can be accepted: resources are lacking or, with error 0, there are enough connections. Returns the new
     * `descriptors`; if that has changed, accepting is tried again at once, otherwise after a while. */
    int (*cannot_accept)(Store *, int error);
    bool (*is_other_user)(Store *, int fd); /* whether another user of this machine has connected; NULL: no check */
};

uint64_t monotonic_now(void);                /* nanoseconds */
bool store_watch(Store *, int fd, void *as); /* let the kernel report input */
void conn_doom(Store *, Conn *);             /* end it at the end of the poll */
void conn_fail(Store *, Conn *);             /* the same, for lack of memory */
bool conn_watch(Store *, Conn *);            /* let the kernel report its events */
void conn_rearm(Store *, Conn *);            /* report current events again */
