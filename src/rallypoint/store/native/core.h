/* The worker store in C: what the files of this folder share.
 *
 * The same store as `table.py`, `decoder.py`, `serving.py` and `polling.py` together, and under the same laws; those
 * files say what is right, and the tests hold both to it. Everything runs on one thread and knows nothing of Python,
 * so the interpreter's lock is not held meanwhile; `module.c` alone speaks with the interpreter.
 *
 *   memory.c    blocks and shared values        requests.c  bytes into commands
 *   table.c     keys, queues, who waits         sockets.c   connections and one epoll set
 *   replies.c   replies on their way out        module.c    the Python type
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
enum { MAX_KEY = 8192, MAX_PAYLOAD = 8 * 1024 * 1024, MAX_KEYS = 131072 };
enum { DONE = 0, MISSING = 1, CANCELLED = 1 };
#define MAGIC 0x3C85F7CEu

enum {
    JOINED = 16 * 1024,      /* bytes up to which a value is copied; a longer one travels as a reference */
    BLOCK = 4 * 1024,        /* bytes of replies to one connection after which its room is looked at */
    PIECE = 64 * 1024,       /* most bytes that are read at once */
    MOST_EVENTS = 1024,      /* connections that are looked at in one sweep */
    AT_ONCE = 64,            /* connections that are served before replies are sent */
};

/* Bytes of somebody else, for as long as he keeps them. */
typedef struct {
    const uint8_t *bytes;
    size_t size;
} Text;

/* A value. Whoever holds it counts; it changes only while one alone holds it. */
typedef struct {
    size_t holders;
    size_t size, room;
    uint8_t bytes[];
} Blob;

typedef struct Conn Conn;
typedef struct Slot Slot;
typedef struct Store Store;

/* One connection waits for one key. It stands in the key's line, and in its connection's block of links. */
typedef struct Link {
    struct Link *before, *after;
    Slot *slot; /* NULL once the key has come */
    Conn *conn;
    uint64_t times; /* how often the connection named the key */
} Link;

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
    Slot **buckets;
    size_t mask;   /* buckets less 1 */
    size_t slots;
    size_t values; /* slots that have a value */
    uint64_t secret[2];
} Table;

/* Bytes for which a connection has no room. */
typedef struct Piece {
    struct Piece *next;
    Blob *blob;
    size_t at;
} Piece;

struct Conn {
    int fd;
    bool greeted;
    bool full; /* the kernel has no room for replies */
    bool over; /* no more requests are taken */
    Conn *before, *after; /* among all connections */

    /* What has come and is not yet a whole request. */
    uint8_t *input;
    size_t input_size, input_room;
    size_t want;       /* how long the input must be before it is worth another look */
    size_t keys_at;    /* in a request of many keys: where the first is that was not seen whole, and how many are not */
    uint64_t keys_left;
    uint64_t pairs_left; /* of the MULTI_SET that is being read */

    Link *links; /* what it waits for */
    size_t link_count;
    uint64_t missing;

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
    REFUSE_NOTHING, LONG_KEY, LONG_VALUE, MANY_KEYS, WRONG_MAGIC, NO_GREETING, GREETED_AGAIN, UNKNOWN_OPCODE, NO_NUMBER
} Reason;

typedef struct {
    Reason reason;
    uint64_t number;
    Text first, second;
} Refusal;

struct Store {
    Table table;
    int epoll, listener, wake; /* no listener: -1 */
    bool woken;
    uint64_t retry;           /* nanoseconds for which nobody is accepted where means were lacking */
    uint64_t accept_again_at; /* 0 while it listens */
    Conn *conns;
    size_t conn_count;

    uint8_t *out; /* small replies, in the order in which they were earned */
    size_t out_size, out_room;
    Segment *segments;
    size_t segment_count, segment_room;
    size_t unflushed; /* bytes in all segments */

    uint8_t *intake; /* PIECE bytes */

    void (*refused)(Store *, Conn *, const Refusal *); /* tell of it */
    void (*starved)(Store *, int error);               /* no means for one more connection */
};

/* memory.c */
void *claim(void *block, size_t size); /* realloc that never fails: the process ends instead */
Blob *blob_new(const uint8_t *bytes, size_t size);
Blob *blob_room(size_t room);
Blob *blob_hold(Blob *);
void blob_drop(Blob *);
Blob *blob_assign(Blob *old, Text value); /* a blob of these bytes in place of `old`, which may be it */
Blob *blob_extend(Blob *old, Text more);

/* table.c */
void table_open(Table *);
void table_close(Table *);
void table_forget(Table *, Conn *);
void table_set(Store *, Text key, Text value);
void table_append(Store *, Text key, Text value);
void table_compare_set(Store *, Conn *, Text key, Text expected, Text desired);
void table_get(Store *, Conn *, Text key);
bool table_has(const Table *, Text key);
bool table_has_value(const Table *, Text key);
bool table_add(Store *, Conn *, Text key, int64_t delta, Refusal *);
bool table_barrier(Store *, Conn *, Text key, int64_t world_size, Refusal *);
void table_enlist(Table *, Conn *, size_t most); /* begin to wait; no more than so many keys follow */
void table_enlist_key(Table *, Conn *, Text key);
void table_num_keys(Store *, Conn *);
void table_list_keys(Store *, Conn *);
void table_delete_key(Store *, Conn *, Text key);
void table_queue_push(Store *, Text key, Text value);
void table_queue_pop(Store *, Conn *, Text key);
void table_queue_len(Store *, Conn *, Text key);

/* replies.c */
void reply_bytes(Store *, Conn *, const void *bytes, size_t size);
void reply_byte(Store *, Conn *, uint8_t byte);
void reply_number(Store *, Conn *, uint64_t number);
void reply_text(Store *, Conn *, Text value);
void reply_blob(Store *, Conn *, Blob *value);     /* the bytes alone */
void reply_value(Store *, Conn *, Blob *value);    /* with its length before it; NULL is empty */
void flush(Store *);
void replies_resume(Conn *);
void replies_drop(Conn *);

/* requests.c */
size_t serve(Store *, Conn *, Text data, Refusal *); /* how many bytes were used up */

/* sockets.c */
int conn_adopt(Store *, int fd, Text data); /* 0, or the error for which it could not be had; then it is not closed */
void conn_rearm(Store *, Conn *); /* say again what is ready there */
bool sweep(Store *, bool may_wait); /* look once at all that is ready; whether there was anything */
int store_open(Store *); /* -1 and errno if it could not be done */
void store_close(Store *); /* ends all connections */
void store_free(Store *);  /* and then what is stored */

#endif
