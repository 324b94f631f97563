/* Parses bytes into commands: incremental and bounded, under the laws of `plain.py`.
 *
 * A request is executed directly from the arrived bytes. An incomplete request stays in its connection's input; `want`
 * is the length of the input at which to parse it again.
 */
#include "requests.h"

#include "commands.h"
#include "listing.h"
#include "replies.h"
#include "waiting.h"
#include "wire.h"

#include <stdlib.h>
#include <string.h>

enum Op { VALIDATE, SET, COMPARE_SET, GET, ADD, CHECK, WAIT, NUM_KEYS, DELETE_KEY, APPEND, MULTI_GET, MULTI_SET,
          CANCEL_WAIT, PING, QUEUE_PUSH, QUEUE_POP, QUEUE_LEN, LIST_KEYS, BARRIER };

/* PAUSED: the request is complete but not done; others have their turn first, or its replies need room. */
typedef enum { WHOLE, LACKING, PAUSED, REFUSED } Found;

/* A position in the data, and the result of the last read there. */
typedef struct {
    Text data;
    size_t at;
    size_t want; /* the least length of the data for the missing field */
    Refusal *refusal;
} Cursor;

static Found refuse(Cursor *cursor, Reason reason, uint64_t number)
{
    *cursor->refusal = (Refusal){.reason = reason, .number = number};
    return REFUSED;
}

static Found need(Cursor *cursor, size_t size)
{
    if (cursor->data.size - cursor->at >= size)
        return WHOLE;
    cursor->want = cursor->at + size;
    return LACKING;
}

static Found fixed(Cursor *cursor, void *result, size_t size)
{
    if (need(cursor, size) != WHOLE)
        return LACKING;
    memcpy(result, cursor->data.bytes + cursor->at, size);
    cursor->at += size;
    return WHOLE;
}

static Found string(Cursor *cursor, Text *result, uint64_t limit)
{
    uint64_t size;
    if (fixed(cursor, &size, 8) != WHOLE)
        return LACKING;
    if (size > limit)
        return refuse(cursor, limit == MAX_KEY ? LONG_KEY : LONG_VALUE, size);
    if (need(cursor, size) != WHOLE)
        return LACKING;
    *result = (Text){cursor->data.bytes + cursor->at, size};
    cursor->at += size;
    return WHOLE;
}

#define READ(attempt)                                                                                                  \
    do {                                                                                                               \
        Found found_ = (attempt);                                                                                      \
        if (found_ != WHOLE)                                                                                           \
            return found_;                                                                                             \
    } while (0)

static Found greeting(Conn *conn, Cursor *cursor)
{
    uint32_t magic;
    READ(fixed(cursor, &magic, 4));
    if (magic != MAGIC)
        return refuse(cursor, WRONG_MAGIC, magic);
    conn->greeted = true;
    ring_remove(&conn->unvalidated);
    return WHOLE;
}

static Found set(Store *store, Conn *conn, Cursor *cursor, bool (*store_it)(Store *, Conn *, Text, Text, Refusal *))
{
    Text key, value;
    READ(string(cursor, &key, MAX_KEY));
    READ(string(cursor, &value, MAX_PAYLOAD));
    return store_it(store, conn, key, value, cursor->refusal) ? WHOLE : REFUSED;
}

static Found compare_set(Store *store, Conn *conn, Cursor *cursor)
{
    Text key, expected, desired;
    READ(string(cursor, &key, MAX_KEY));
    READ(string(cursor, &expected, MAX_PAYLOAD));
    READ(string(cursor, &desired, MAX_PAYLOAD));
    return command_compare_set(store, conn, key, expected, desired, cursor->refusal) ? WHOLE : REFUSED;
}

static Found with_key(Store *store, Conn *conn, Cursor *cursor, void (*command)(Store *, Conn *, Text))
{
    Text key;
    READ(string(cursor, &key, MAX_KEY));
    command(store, conn, key);
    return WHOLE;
}

static Found with_number(Store *store, Conn *conn, Cursor *cursor,
                         bool (*command)(Store *, Conn *, Text, int64_t, Refusal *))
{
    Text key;
    int64_t number;
    READ(string(cursor, &key, MAX_KEY));
    READ(fixed(cursor, &number, 8));
    return command(store, conn, key, number, cursor->refusal) ? WHOLE : REFUSED;
}

/* The next key of a complete request. */
static Text next_key(Store *store, Conn *conn, const Cursor *cursor)
{
    uint64_t size;
    memcpy(&size, cursor->data.bytes + conn->doing_at, 8);
    Text key = {cursor->data.bytes + conn->doing_at + 8, size};
    conn->doing_at += 8 + size;
    conn->doing_left--;
    store->steps++;
    return key;
}

/* Starts at the first key of a complete request. */
static void begin_keys(Conn *conn, const Cursor *cursor)
{
    memcpy(&conn->doing_left, cursor->data.bytes + 1, 8);
    conn->doing_at = 9;
}

/* Handles one key of the request. */
static Found see_to(Store *store, Conn *conn, Cursor *cursor)
{
    Text key = next_key(store, conn, cursor);
    switch (conn->doing) {
    case CHECKING:
        if (!command_has(&store->table, key)) {
            reply_byte(store, conn, MISSING);
            conn->doing = NOTHING;
        }
        return WHOLE;
    case LOOKING:
        if (command_has(&store->table, key))
            return WHOLE;
        conn->doing = ENLISTING; /* starting with the first key */
        begin_keys(conn, cursor);
        return wait_begin(store, conn, conn->doing_left) ? WHOLE : refuse(cursor, NO_MEMORY, 0);
    case ENLISTING:
        /* A key with only a queue counts as missing here, although a wait for it alone would end at once. */
        if (!command_has_value(&store->table, key) && !wait_for_key(store, conn, key))
            return refuse(cursor, NO_MEMORY, 0);
        return WHOLE;
    default:
        command_get(store, conn, key);
        if (store->owed >= BLOCK)
            flush(store);
        if (conn->reading_stopped)
            conn->doing = NOTHING;
        return WHOLE;
    }
}

/* Continues a request of many keys, as far as its slice and the room for replies allow. */
static Found keys_some(Store *store, Conn *conn, Cursor *cursor)
{
    while (conn->doing != NOTHING && conn->doing_left) {
        if (conn->full || conn->failed || store->steps >= SLICE)
            return PAUSED;
        READ(see_to(store, conn, cursor));
    }
    Doing done = conn->doing;
    conn->doing = NOTHING;
    cursor->at = conn->doing_end;
    if (done == CHECKING || done == LOOKING)
        reply_byte(store, conn, DONE);
    else if (done == ENLISTING)
        wait_end_of_keys(store, conn);
    return WHOLE;
}

static Found with_keys(Store *store, Conn *conn, Cursor *cursor, Doing doing)
{
    uint64_t count;
    READ(fixed(cursor, &count, 8));
    if (count > MAX_KEYS)
        return refuse(cursor, MANY_KEYS, count);
    uint64_t left = count;
    if (conn->keys_at) { /* some were complete in an earlier read */
        left = conn->keys_left;
        cursor->at = conn->keys_at;
    }
    for (; left; left--) {
        Text key;
        size_t at = cursor->at;
        Found found = string(cursor, &key, MAX_KEY);
        if (found == LACKING && cursor->want > store->limits.request)
            return refuse(cursor, LONG_REQUEST, cursor->want);
        if (found != WHOLE) {
            conn->keys_at = at;
            conn->keys_left = left;
            return found;
        }
    }
    conn->keys_at = 0;
    conn->doing = doing;
    conn->doing_end = cursor->at;
    begin_keys(conn, cursor);
    return keys_some(store, conn, cursor);
}

static Found with_pairs(Conn *conn, Cursor *cursor)
{
    uint64_t count;
    READ(fixed(cursor, &count, 8));
    if (count > MAX_KEYS)
        return refuse(cursor, MANY_KEYS, count);
    conn->pairs_left = count;
    return WHOLE;
}

static Found ping(Store *store, Conn *conn, Cursor *cursor)
{
    uint32_t nonce;
    READ(fixed(cursor, &nonce, 4));
    reply_bytes(store, conn, &nonce, 4);
    return WHOLE;
}

static Found unexpected_request(Cursor *cursor, Reason reason)
{
    size_t at = cursor->at - 1, size = cursor->data.size - at;
    refuse(cursor, reason, 0);
    cursor->refusal->first = (Text){cursor->data.bytes + at, size < 16 ? size : 16};
    return REFUSED;
}

static Found alone(void (*command)(Store *, Conn *), Store *store, Conn *conn)
{
    command(store, conn);
    return WHOLE;
}

static void cancel_wait(Store *store, Conn *conn)
{
    wait_cancel(store, conn);
    reply_byte(store, conn, CANCELLED);
}

static Found list_keys(Store *store, Conn *conn, Cursor *cursor)
{
    return list_begin(store, conn) ? WHOLE : refuse(cursor, NO_MEMORY, 0);
}

static Found request(Store *store, Conn *conn, Cursor *cursor)
{
    if (conn->doing != NOTHING)
        return keys_some(store, conn, cursor);
    if (conn->pairs_left) {
        READ(set(store, conn, cursor, command_set));
        conn->pairs_left--;
        return WHOLE;
    }
    uint8_t op = cursor->data.bytes[cursor->at++];
    if (!conn->greeted)
        return op == VALIDATE ? greeting(conn, cursor) : unexpected_request(cursor, NO_GREETING);
    switch (op) {
    case VALIDATE: return unexpected_request(cursor, GREETED_AGAIN);
    case SET: return set(store, conn, cursor, command_set);
    case COMPARE_SET: return compare_set(store, conn, cursor);
    case GET: return with_key(store, conn, cursor, command_get);
    case ADD: return with_number(store, conn, cursor, command_add);
    case CHECK: return with_keys(store, conn, cursor, CHECKING);
    case WAIT: return with_keys(store, conn, cursor, LOOKING);
    case NUM_KEYS: return alone(command_num_keys, store, conn);
    case DELETE_KEY: return with_key(store, conn, cursor, command_delete_key);
    case APPEND: return set(store, conn, cursor, command_append);
    case MULTI_GET: return with_keys(store, conn, cursor, GETTING);
    case MULTI_SET: return with_pairs(conn, cursor);
    case CANCEL_WAIT: return alone(cancel_wait, store, conn);
    case PING: return ping(store, conn, cursor);
    case QUEUE_PUSH: return set(store, conn, cursor, command_queue_push);
    case QUEUE_POP: return with_key(store, conn, cursor, command_queue_pop);
    case QUEUE_LEN: return with_key(store, conn, cursor, command_queue_len);
    case LIST_KEYS: return list_keys(store, conn, cursor);
    case BARRIER: return with_number(store, conn, cursor, command_barrier);
    default: return unexpected_request(cursor, UNKNOWN_OPCODE);
    }
}

/* Serves requests until one is incomplete, there is no room for replies, or the slice ends. */
static size_t requests(Store *store, Conn *conn, Text data, Refusal *refusal)
{
    size_t used = 0;
    while (!conn->full && !conn->failed && store->steps < SLICE && !wait_must_pause(store, conn)) {
        if (conn->listing != NULL) {
            list_some(store, conn);
            continue;
        }
        if (used == data.size)
            break;
        Cursor cursor = {.data = {data.bytes + used, data.size - used}, .refusal = refusal};
        Found found = request(store, conn, &cursor);
        if (found == LACKING)
            conn->want = cursor.want;
        if (found == LACKING || found == REFUSED)
            break;
        if (found == WHOLE) {
            used += cursor.at;
            store->steps += 1 + cursor.at / STEP;
        }
        if (store->owed >= BLOCK)
            flush(store);
    }
    return used;
}

/* Adds the growth from `before` to `now`. */
static uint64_t grown(uint64_t sum, uint64_t before, uint64_t now)
{
    return now >= before ? sum + (now - before) : sum > before - now ? sum - (before - now) : 0;
}

size_t serve(Store *store, Conn *conn, Text data, Refusal *refusal)
{
    uint64_t keys = store->table.keys, bytes = store->table.bytes;
    conn->want = 0;
    store->serving = conn;
    store->owed = store->steps = 0;
    size_t used = requests(store, conn, data, refusal);
    conn->keys = grown(conn->keys, keys, store->table.keys);
    conn->bytes = grown(conn->bytes, bytes, store->table.bytes);
    if (refusal->reason == REFUSE_NOTHING && conn->keys > store->limits.keys)
        *refusal = (Refusal){.reason = KEYS_OF_ONE, .number = conn->keys};
    else if (refusal->reason == REFUSE_NOTHING && conn->bytes > store->limits.bytes)
        *refusal = (Refusal){.reason = BYTES_OF_ONE, .number = conn->bytes};
    return used;
}
