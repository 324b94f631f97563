/* Bytes into commands: incremental and bounded, under the laws of `decoder.py`.
 *
 * A request is executed straight from the bytes that arrived. What is not yet whole stays in its connection's input,
 * and `want` says how long that must become before it is worth another look.
 */
#include "core.h"

#include <stdlib.h>
#include <string.h>

enum Op { VALIDATE, SET, COMPARE_SET, GET, ADD, CHECK, WAIT, NUM_KEYS, DELETE_KEY, APPEND, MULTI_GET, MULTI_SET,
          CANCEL_WAIT, PING, QUEUE_PUSH, QUEUE_POP, QUEUE_LEN, LIST_KEYS, BARRIER };

typedef enum { WHOLE, LACKING, REFUSED } Found;

/* A place in the data, and what became of the last attempt to read there. */
typedef struct {
    Text data;
    size_t at;
    size_t want; /* where the data would have to end for the field that is lacking */
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
    return WHOLE;
}

static Found set(Store *store, Cursor *cursor, void (*store_it)(Store *, Text, Text))
{
    Text key, value;
    READ(string(cursor, &key, MAX_KEY));
    READ(string(cursor, &value, MAX_PAYLOAD));
    store_it(store, key, value);
    return WHOLE;
}

static Found compare_set(Store *store, Conn *conn, Cursor *cursor)
{
    Text key, expected, desired;
    READ(string(cursor, &key, MAX_KEY));
    READ(string(cursor, &expected, MAX_PAYLOAD));
    READ(string(cursor, &desired, MAX_PAYLOAD));
    table_compare_set(store, conn, key, expected, desired);
    return WHOLE;
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

/* Keys that were all seen whole, one after the other. */
static Text next_key(const uint8_t **at)
{
    Text key = {*at + 8, 0};
    uint64_t size;
    memcpy(&size, *at, 8);
    key.size = size;
    *at += 8 + size;
    return key;
}

static void check(Store *store, Conn *conn, const uint8_t *keys, uint64_t count)
{
    bool all = true;
    while (all && count--)
        all = table_has(&store->table, next_key(&keys));
    reply_byte(store, conn, all ? DONE : MISSING);
}

static void wait(Store *store, Conn *conn, const uint8_t *keys, uint64_t count)
{
    const uint8_t *at = keys;
    bool all = true;
    for (uint64_t i = 0; all && i < count; i++)
        all = table_has(&store->table, next_key(&at));
    if (all) {
        reply_byte(store, conn, DONE);
        return;
    }
    table_enlist(&store->table, conn, count);
    /* A key that has only a queue counts as missing here, although a wait for it alone would be over at once. */
    for (; count; count--) {
        Text key = next_key(&keys);
        if (!table_has_value(&store->table, key))
            table_enlist_key(&store->table, conn, key);
    }
}

static void multi_get(Store *store, Conn *conn, const uint8_t *keys, uint64_t count)
{
    for (; count; count--)
        table_get(store, conn, next_key(&keys));
}

static Found with_keys(Store *store, Conn *conn, Cursor *cursor,
                       void (*command)(Store *, Conn *, const uint8_t *, uint64_t))
{
    uint64_t count;
    READ(fixed(cursor, &count, 8));
    if (count > MAX_KEYS)
        return refuse(cursor, MANY_KEYS, count);
    const uint8_t *keys = cursor->data.bytes + cursor->at;
    uint64_t left = count;
    if (conn->keys_at) { /* some were seen whole when less had come */
        left = conn->keys_left;
        cursor->at = conn->keys_at;
    }
    for (; left; left--) {
        Text key;
        size_t at = cursor->at;
        Found found = string(cursor, &key, MAX_KEY);
        if (found != WHOLE) {
            conn->keys_at = at;
            conn->keys_left = left;
            return found;
        }
    }
    conn->keys_at = 0;
    command(store, conn, keys, count);
    return WHOLE;
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

static Found strange(Cursor *cursor, Reason reason)
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
    table_forget(&store->table, conn);
    reply_byte(store, conn, CANCELLED);
}

static Found request(Store *store, Conn *conn, Cursor *cursor)
{
    if (conn->pairs_left) {
        READ(set(store, cursor, table_set));
        conn->pairs_left--;
        return WHOLE;
    }
    uint8_t op = cursor->data.bytes[cursor->at++];
    if (!conn->greeted)
        return op == VALIDATE ? greeting(conn, cursor) : strange(cursor, NO_GREETING);
    switch (op) {
    case VALIDATE: return strange(cursor, GREETED_AGAIN);
    case SET: return set(store, cursor, table_set);
    case COMPARE_SET: return compare_set(store, conn, cursor);
    case GET: return with_key(store, conn, cursor, table_get);
    case ADD: return with_number(store, conn, cursor, table_add);
    case CHECK: return with_keys(store, conn, cursor, check);
    case WAIT: return with_keys(store, conn, cursor, wait);
    case NUM_KEYS: return alone(table_num_keys, store, conn);
    case DELETE_KEY: return with_key(store, conn, cursor, table_delete_key);
    case APPEND: return set(store, cursor, table_append);
    case MULTI_GET: return with_keys(store, conn, cursor, multi_get);
    case MULTI_SET: return with_pairs(conn, cursor);
    case CANCEL_WAIT: return alone(cancel_wait, store, conn);
    case PING: return ping(store, conn, cursor);
    case QUEUE_PUSH: return set(store, cursor, table_queue_push);
    case QUEUE_POP: return with_key(store, conn, cursor, table_queue_pop);
    case QUEUE_LEN: return with_key(store, conn, cursor, table_queue_len);
    case LIST_KEYS: return alone(table_list_keys, store, conn);
    case BARRIER: return with_number(store, conn, cursor, table_barrier);
    default: return strange(cursor, UNKNOWN_OPCODE);
    }
}

size_t serve(Store *store, Conn *conn, Text data, Refusal *refusal)
{
    size_t used = 0, before = store->unflushed;
    conn->want = 0;
    while (used < data.size) {
        Cursor cursor = {.data = {data.bytes + used, data.size - used}, .refusal = refusal};
        Found found = request(store, conn, &cursor);
        if (found == REFUSED)
            break;
        if (found == LACKING) {
            conn->want = cursor.want;
            break;
        }
        used += cursor.at;
        if (store->unflushed - before >= BLOCK) {
            flush(store);
            before = 0;
            if (conn->full)
                break;
        }
    }
    return used;
}
