/* The worker store in C: what the files of this folder share.
 *
 * The same store as `table.py`, `decoder.py`, `serving.py` and `polling.py` together, and under the same laws; those
 * files say what is right, and the tests hold both to it. Everything runs on one thread and knows nothing of Python,
 * so the interpreter's lock is not held meanwhile; `module.c` alone speaks with the interpreter.
 *
 *   memory.c    blocks, shared values, rings    requests.c  bytes into commands
 *   table.c     keys and queues                 replies.c   replies on their way out
 *   waiting.c   who waits for keys              sockets.c   connections and one epoll set
 *   listing.c   lists of all keys               module.c    the Python type
 *
 * Any block of memory may be refused. Whoever asks for one looks, and changes nothing before he has it; then the
 * connection for which it was ends (NO_MEMORY), and all others go on.
 */
#ifndef RALLYPOINT_CORE_H
#define RALLYPOINT_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "numbers travel with their lowest byte first and are copied as they are"
#endif

/* The protocol's limits and words; `wire.py` explains them. */
enum { MAX_KEY = 8192, MAX_PAYLOAD = 8 * 1024 * 1024, MAX_KEYS = 131072, MAX_NUMBER = 4096 };
enum { DONE = 0, MISSING = 1, CANCELLED = 1 };
#define MAGIC 0x3C85F7CEu

enum {
    JOINED = 16 * 1024,      /* bytes up to which a value is copied; a longer one travels as a reference */
    BLOCK = 4 * 1024,        /* bytes of replies to one connection after which its room is looked at */
    PIECE = 64 * 1024,       /* most bytes that are read at once, unless a request that has begun needs more */
    MOST_READ = 1024 * 1024, /* and then */
    OUT_ROOM = 256 * 1024,   /* bytes of small replies that wait to be sent */
    OUT_SEGMENTS = 4096,
    MOST_EVENTS = 1024,      /* connections that are looked at in one sweep */
    AT_ONCE = 64,            /* connections that are served before replies are sent */
    MOST_ACCEPTED = 256,     /* connections that are accepted in one sweep */
    SLICE = 1024,            /* steps of one connection before others have their turn: some 100 microseconds */
    STEP = 4096,             /* bytes that count as one step */
    OVERHEAD = 64,           /* bytes that a key, and a value in a queue, count beside their own */
    SHARDS = 1024,           /* parts of the table; what must be done to all keys is done part by part */
};

/* Bytes of somebody else, for as long as he keeps them. */
typedef struct {
    const uint8_t *bytes;
    size_t size;
} Text;

/* A value. Whoever holds it counts. What others hold of it stays as it is: it may only become longer. */
typedef struct {
    size_t holders;
    size_t size, room;
    uint8_t bytes[];
} Blob;

/* A place in a ring of neighbours; one that is in no ring has none. */
typedef struct Node {
    struct Node *before, *after;
} Node;

typedef struct Conn Conn;
typedef struct Slot Slot;
typedef struct Store Store;
typedef struct Waiting Waiting;

/* One connection waits for one key. It stands in the key's line, and in its connection's `ProgressText`. */
typedef struct Link {
    struct Link *before, *after;
    Slot *slot; /* NULL once the key has come */
    Waiting *waiting;
    uint64_t times; /* how often the connection named the key */
} Link;

/* What one connection waits for. */
struct Waiting {
    Node node;  /* among those that were given up, until they are taken apart */
    Conn *conn; /* NULL once it was given up */
    uint64_t missing;
    size_t count, seen; /* links, and of those given up how many were taken apart */
    Link links[];
};

/* One value of a queue. */
typedef struct Item {
    struct Item *next;
    Blob *value;
} Item;

/* All that goes by one name; it is there as long as there is any of it. */
struct Slot {
    Slot *next; /* in the bucket */
    uint64_t hash;
    Blob *value;
    Item *oldest, *newest;
    uint64_t queued;
    Link *first, *last; /* who waits, in the order in which they came */
    size_t size;
    uint8_t key[];
};

typedef struct {
    Slot **buckets; /* none before the first key */
    size_t mask;    /* buckets less 1 */
    size_t slots;
    uint64_t listed; /* the number of the last listing that was given the names of this part */
} Shard;

typedef struct {
    Shard shards[SHARDS];
    uint64_t secret[2];
    uint64_t values; /* slots that have a value */
    uint64_t keys;   /* slots with a value or a queue */
    uint64_t bytes;  /* of all keys that have a value, values and queues */
} Table;

/* A list of all keys that is being sent, as they were when it was asked for. */
typedef struct {
    Node node; /* among all of them, the newest first */
    Conn *conn;
    uint64_t number;
    size_t at;    /* the part that is next */
    Blob **names; /* of the parts that have changed since, what was in them; none before one has */
} Listing;

/* Bytes for which a connection has no room. */
typedef struct Piece {
    struct Piece *next;
    Blob *blob;
    size_t at, end;
} Piece;

/* A request of many keys of which some were seen to. */
typedef enum { NOTHING, CHECKING, LOOKING, ENLISTING, GETTING } Doing;

struct Conn {
    Node all, young, busy, doomed; /* everybody; not greeted; with work that no event tells of; to be closed */
    int fd;
    bool greeted;
    bool full; /* the kernel has no room for replies */
    bool over;   /* no more requests are taken */
    bool failed; /* there was no memory for what it is owed */
    bool deaf;   /* it reads no replies any more */
    uint64_t since; /* when it came */

    /* What has come and is not yet done. */
    uint8_t *input;
    size_t input_at, input_size, input_room;
    size_t want;       /* how long the input must be before it is worth another look */
    size_t keys_at;    /* in a request of many keys: where the first is that was not seen whole, and how many are not */
    uint64_t keys_left;
    uint64_t pairs_left; /* of the MULTI_SET that is being read */

    Doing doing; /* with a request of many keys that has come whole: which key is next, how many are left, its end */
    size_t doing_at, doing_end;
    uint64_t doing_left;

    Waiting *waiting;
    Listing *listing;
    uint64_t keys, bytes; /* by how much it has made the table larger */

    Piece *backlog, *backlog_end;
};

/* Replies to one connection: bytes in the store's `out`, or a value. */
typedef struct {
    Conn *conn;
    Blob *blob;
    size_t at, size;
} Segment;

/* Why a connection is refused; `compiled.py` has the sentences. */
typedef enum {
    REFUSE_NOTHING, LONG_KEY, LONG_VALUE, MANY_KEYS, WRONG_MAGIC, NO_GREETING, GREETED_AGAIN, UNKNOWN_OPCODE, NO_NUMBER,
    NO_MEMORY, LONG_REQUEST, GROWN_VALUE, KEYS_OF_ONE, BYTES_OF_ONE, SILENT, NOT_A_PEER
} Reason;

typedef struct {
    Reason reason;
    uint64_t number;
    Text first, second;
} Refusal;

/* What a store grants; `guard.py` explains it. */
typedef struct {
    uint64_t retry;    /* nanoseconds for which nobody is accepted where means were lacking */
    uint64_t greeting; /* nanoseconds that a connection has to greet; 0 for ever */
    uint64_t connections, request, value, keys, bytes;
} Limits;

/* A network, as IPv6 has it. */
typedef struct {
    uint8_t address[16];
    uint8_t bits;
} Network;

struct Store {
    Table table;
    Limits limits;
    int epoll, listener, wake; /* no listener: -1 */
    int descriptors;           /* from this number on they are for others in this process */
    bool woken;
    bool crowded;             /* it does not listen because there are enough connections */
    uint64_t accept_again_at; /* 0 while it listens */

    bool guarded; /* only `peers` may connect */
    Network *peers;
    size_t peer_count, host_count; /* so many of them, the first, are single addresses, in order */

    Node all, young, busy, doomed; /* rings of connections */
    size_t conn_count;
    Node given_up; /* of what is waited for by nobody any more */
    Node listings;
    uint64_t listing_number;

    uint8_t *out; /* small replies, in the order in which they were earned: OUT_ROOM bytes */
    size_t out_size;
    Segment *segments; /* OUT_SEGMENTS of them */
    size_t segment_count;
    Conn *serving;  /* the connection that is being served; bytes that are owed to it, and steps that it has taken */
    size_t owed, steps;

    uint8_t *intake; /* PIECE bytes */

    void (*refused)(Store *, int fd, const Refusal *); /* tell of it */
    /* Nobody can be accepted: no means, or with 0 enough connections. What `descriptors` is to be; if that is
     * something else than before, it is tried again at once, and else after a while. */
    int (*starved)(Store *, int error);
};

/* memory.c */
void *get_block(void *block, size_t size); /* realloc; NULL and no change if it cannot be had */
Blob *blob_new(Text);
Blob *blob_room(size_t room);
Blob *blob_hold(Blob *);
void blob_drop(Blob *);
Blob *blob_assign(Blob *old, Text value);                /* of these bytes, in place of `old`, which may be it */
Blob *blob_extend(Blob *old, Text more, uint64_t limit); /* NULL, and `old` as it was, if it cannot be */
void ring_open(Node *);
void ring_add(Node *ring, Node *);
void ring_remove(Node *); /* does nothing if it is in none */
#define MEMBER(node, type, field) ((type *)((char *)(node) - offsetof(type, field)))
#define FIRST(ring, type, field) ((ring)->after == (ring) ? NULL : MEMBER((ring)->after, type, field))

/* table.c; what returns a bool or a Slot may find no memory, and has changed nothing then */
void table_open(Table *);
void table_close(Table *);
Slot *table_find(const Table *, Text key);
Slot *table_find_or_make(Table *, Text key);
void table_tidy(Table *, Slot *);
bool table_set(Store *, Conn *, Text key, Text value, Refusal *);
bool table_append(Store *, Conn *, Text key, Text value, Refusal *);
bool table_compare_set(Store *, Conn *, Text key, Text expected, Text desired, Refusal *);
void table_get(Store *, Conn *, Text key);
bool table_has(const Table *, Text key);
bool table_has_value(const Table *, Text key);
bool table_add(Store *, Conn *, Text key, int64_t delta, Refusal *);
bool table_barrier(Store *, Conn *, Text key, int64_t world_size, Refusal *);
void table_num_keys(Store *, Conn *);
void table_delete_key(Store *, Conn *, Text key);
bool table_queue_push(Store *, Conn *, Text key, Text value, Refusal *);
void table_queue_pop(Store *, Conn *, Text key);
void table_queue_len(Store *, Conn *, Text key);

/* waiting.c */
bool wait_begin(Store *, Conn *, size_t most); /* no more than so many keys follow; what was waited for is given up */
bool wait_for_key(Store *, Conn *, Text key);
void wait_settle(Store *, Conn *); /* all keys were named */
void wait_give_up(Store *, Conn *);
bool wait_clear(Store *, size_t steps); /* take apart what was given up; whether something is left */
void wake_all(Store *, Slot *);
void wake_first(Store *, Slot *);

/* listing.c */
bool list_begin(Store *, Conn *);
void list_some(Store *, Conn *); /* until the slice is over, or the room for replies */
void list_end(Conn *);
void list_freeze(Store *, size_t shard); /* before a name comes or goes there */

/* replies.c */
void reply_bytes(Store *, Conn *, const void *bytes, size_t size); /* no more than JOINED */
void reply_byte(Store *, Conn *, uint8_t byte);
void reply_number(Store *, Conn *, uint64_t number);
void reply_blob(Store *, Conn *, Blob *value);  /* the bytes alone */
void reply_value(Store *, Conn *, Blob *value); /* with its length before it; NULL is empty */
void flush(Store *);
void replies_resume(Store *, Conn *);
void replies_drop(Conn *);

/* requests.c */
size_t serve(Store *, Conn *, Text data, Refusal *); /* how many bytes were used up */

/* sockets.c */
void conn_fail(Store *, Conn *); /* there is no memory for it: end it, as soon as nothing is in the midst of anything */
void conn_rearm(Store *, Conn *);                   /* say again what is ready there */
int conn_adopt(Store *, int fd, Text data); /* 0, or the error for which it could not be had; then it is not closed */
bool sweep(Store *, bool may_wait);         /* look once at all that is ready; whether there was anything to do */
void store_admit(Store *, Network *peers, size_t count, bool guarded); /* takes `peers` over */
int store_open(Store *);   /* -1 and errno if it could not be done */
void store_close(Store *); /* ends all connections */
void store_free(Store *);  /* and then what is stored */

#endif
