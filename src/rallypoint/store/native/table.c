/* What the requests mean: keys, queues, waiters and barriers, under the laws of `table.py`. */
#include "core.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum { FIRST_BUCKETS = 64 };

/* SipHash-1-3 with a secret: a stranger cannot choose keys that all fall into one bucket. */
#define ROTATE(x, b) (((x) << (b)) | ((x) >> (64 - (b))))
#define ROUND                                                                                                          \
    do {                                                                                                               \
        v0 += v1, v2 += v3;                                                                                            \
        v1 = ROTATE(v1, 13) ^ v0, v3 = ROTATE(v3, 16) ^ v2;                                                            \
        v0 = ROTATE(v0, 32);                                                                                           \
        v2 += v1, v0 += v3;                                                                                            \
        v1 = ROTATE(v1, 17) ^ v2, v3 = ROTATE(v3, 21) ^ v0;                                                            \
        v2 = ROTATE(v2, 32);                                                                                           \
    } while (0)

static uint64_t hash(const Table *table, Text key)
{
    uint64_t v0 = table->secret[0] ^ 0x736f6d6570736575u, v1 = table->secret[1] ^ 0x646f72616e646f6du;
    uint64_t v2 = table->secret[0] ^ 0x6c7967656e657261u, v3 = table->secret[1] ^ 0x7465646279746573u;
    const uint8_t *at = key.bytes, *end = key.bytes + (key.size & ~(size_t)7);
    uint64_t word;
    for (; at < end; at += 8) {
        memcpy(&word, at, 8);
        v3 ^= word;
        ROUND;
        v0 ^= word;
    }
    word = (uint64_t)key.size << 56;
    for (size_t i = 0; i < (key.size & 7); i++)
        word |= (uint64_t)at[i] << (8 * i);
    v3 ^= word;
    ROUND;
    v0 ^= word;
    v2 ^= 0xff;
    ROUND;
    ROUND;
    ROUND;
    return v0 ^ v1 ^ v2 ^ v3;
}

void table_open(Table *table)
{
    memset(table, 0, sizeof *table);
    table->mask = FIRST_BUCKETS - 1;
    table->buckets = claim(NULL, FIRST_BUCKETS * sizeof(Slot *));
    memset(table->buckets, 0, FIRST_BUCKETS * sizeof(Slot *));
    if (getrandom(table->secret, sizeof table->secret, 0) != (ssize_t)sizeof table->secret)
        abort(); /* so few bytes are always had at once */
}

static void items_free(Slot *slot)
{
    while (slot->oldest != NULL) {
        Item *item = slot->oldest;
        slot->oldest = item->next;
        blob_drop(item->value);
        free(item);
    }
}

void table_close(Table *table)
{
    for (size_t i = 0; i <= table->mask; i++)
        while (table->buckets[i] != NULL) {
            Slot *slot = table->buckets[i];
            table->buckets[i] = slot->next;
            blob_drop(slot->value);
            items_free(slot);
            free(slot);
        }
    free(table->buckets);
    table->buckets = NULL;
}

static Slot *find_hashed(const Table *table, Text key, uint64_t hashed)
{
    Slot *slot = table->buckets[hashed & table->mask];
    while (slot != NULL && (slot->hash != hashed || slot->size != key.size || memcmp(slot->key, key.bytes, key.size)))
        slot = slot->next;
    return slot;
}

static Slot *find(const Table *table, Text key)
{
    return find_hashed(table, key, hash(table, key));
}

static void grow(Table *table)
{
    size_t old = table->mask + 1, count = 2 * old;
    Slot **buckets = claim(NULL, count * sizeof(Slot *));
    memset(buckets, 0, count * sizeof(Slot *));
    for (size_t i = 0; i < old; i++)
        for (Slot *slot = table->buckets[i], *next; slot != NULL; slot = next) {
            Slot **bucket = &buckets[slot->hash & (count - 1)];
            next = slot->next;
            slot->next = *bucket;
            *bucket = slot;
        }
    free(table->buckets);
    table->buckets = buckets;
    table->mask = count - 1;
}

static Slot *find_or_make(Table *table, Text key)
{
    uint64_t hashed = hash(table, key);
    Slot *slot = find_hashed(table, key, hashed);
    if (slot != NULL)
        return slot;
    if (table->slots > table->mask)
        grow(table);
    slot = claim(NULL, sizeof(Slot) + key.size);
    memset(slot, 0, sizeof(Slot));
    slot->hash = hashed;
    slot->size = key.size;
    if (key.size)
        memcpy(slot->key, key.bytes, key.size);
    Slot **bucket = &table->buckets[hashed & table->mask];
    slot->next = *bucket;
    *bucket = slot;
    table->slots++;
    return slot;
}

/* A name of which nothing is left is forgotten. */
static void tidy(Table *table, Slot *slot)
{
    if (slot->value != NULL || slot->oldest != NULL || slot->first != NULL)
        return;
    Slot **at = &table->buckets[slot->hash & table->mask];
    while (*at != slot)
        at = &(*at)->next;
    *at = slot->next;
    free(slot);
    table->slots--;
}

static void put(Table *table, Slot *slot, Text value)
{
    table->values += slot->value == NULL;
    slot->value = blob_assign(slot->value, value);
}

/* Takes the link out of its key's line; the key may have to be tidied then. */
static void unlink_one(Link *link)
{
    Slot *slot = link->slot;
    *(link->before ? &link->before->after : &slot->first) = link->after;
    *(link->after ? &link->after->before : &slot->last) = link->before;
    link->slot = NULL;
}

static void wait_over(Conn *conn)
{
    free(conn->links);
    conn->links = NULL;
    conn->link_count = 0;
    conn->missing = 0;
}

void table_forget(Table *table, Conn *conn)
{
    for (size_t i = 0; i < conn->link_count; i++) {
        Slot *slot = conn->links[i].slot;
        if (slot != NULL) {
            unlink_one(&conn->links[i]);
            tidy(table, slot);
        }
    }
    wait_over(conn);
}

void table_enlist(Table *table, Conn *conn, size_t most)
{
    table_forget(table, conn);
    conn->links = claim(NULL, most * sizeof(Link));
}

void table_enlist_key(Table *table, Conn *conn, Text key)
{
    Slot *slot = find_or_make(table, key);
    conn->missing++;
    if (slot->last != NULL && slot->last->conn == conn) { /* named before in this request: nobody else came between */
        slot->last->times++;
        return;
    }
    Link *link = &conn->links[conn->link_count++];
    *link = (Link){.before = slot->last, .slot = slot, .conn = conn, .times = 1};
    *(slot->last ? &slot->last->after : &slot->first) = link;
    slot->last = link;
}

/* The link's key has come: whether that was the last that its connection missed. */
static bool found(Store *store, Link *link)
{
    Conn *conn = link->conn;
    conn->missing -= link->times;
    unlink_one(link);
    if (conn->missing)
        return false;
    wait_over(conn);
    reply_byte(store, conn, DONE);
    return true;
}

static void wake(Store *store, Slot *slot)
{
    while (slot->first != NULL)
        found(store, slot->first);
}

static void wake_first(Store *store, Slot *slot)
{
    while (slot->first != NULL && !found(store, slot->first))
        ;
}

void table_set(Store *store, Text key, Text value)
{
    Slot *slot = find_or_make(&store->table, key);
    put(&store->table, slot, value);
    wake(store, slot);
}

void table_append(Store *store, Text key, Text value)
{
    Slot *slot = find_or_make(&store->table, key);
    store->table.values += slot->value == NULL;
    slot->value = blob_extend(slot->value, value);
    wake(store, slot);
}

void table_compare_set(Store *store, Conn *conn, Text key, Text expected, Text desired)
{
    Table *table = &store->table;
    Slot *slot = find(table, key);
    Blob *present = slot ? slot->value : NULL;
    size_t size = present ? present->size : 0;
    if (expected.size == size && (size == 0 || memcmp(expected.bytes, present->bytes, size) == 0)) {
        if (slot == NULL)
            slot = find_or_make(table, key);
        put(table, slot, desired);
        present = slot->value;
    }
    if (slot != NULL)
        wake(store, slot);
    /* Where the key is missing and something was expected, the protocol gives back what was expected. */
    if (present != NULL)
        reply_value(store, conn, present);
    else
        reply_text(store, conn, expected);
    if (slot != NULL)
        tidy(table, slot);
}

void table_get(Store *store, Conn *conn, Text key)
{
    Slot *slot = find(&store->table, key);
    reply_value(store, conn, slot ? slot->value : NULL);
}

bool table_has_value(const Table *table, Text key)
{
    Slot *slot = find(table, key);
    return slot != NULL && slot->value != NULL;
}

bool table_has(const Table *table, Text key)
{
    Slot *slot = find(table, key);
    return slot != NULL && (slot->value != NULL || slot->oldest != NULL);
}

/* The decimal number at the beginning, as strtoll reads it: blanks before, anything behind. False if there is none. */
static bool number(const Blob *text, int64_t *result)
{
    const uint8_t *at = text->bytes, *end = at + text->size;
    while (at < end && (*at == ' ' || (*at >= '\t' && *at <= '\r')))
        at++;
    bool negative = at < end && *at == '-';
    if (at < end && (*at == '+' || *at == '-'))
        at++;
    if (at == end || *at < '0' || *at > '9')
        return false;
    uint64_t size = 0, most = negative ? (uint64_t)1 << 63 : ((uint64_t)1 << 63) - 1;
    for (; at < end && *at >= '0' && *at <= '9'; at++) {
        unsigned digit = *at - '0';
        if (size > (most - digit) / 10)
            return false;
        size = size * 10 + digit;
    }
    *result = (int64_t)(negative ? 0 - size : size);
    return true;
}

static Slot *increase(Table *table, Text key, int64_t delta, int64_t *total, Refusal *refusal)
{
    Slot *slot = find_or_make(table, key);
    int64_t present = 0;
    if (slot->value != NULL && !number(slot->value, &present)) {
        const Blob *text = slot->value;
        *refusal = (Refusal){
            .reason = NO_NUMBER,
            .first = {text->bytes, text->size < 40 ? text->size : 40},
            .second = {slot->key, slot->size < 200 ? slot->size : 200},
        };
        return NULL;
    }
    *total = (int64_t)((uint64_t)present + (uint64_t)delta); /* beyond the highest it begins with the lowest again */
    uint8_t text[24], *at = text + sizeof text;
    uint64_t rest = *total < 0 ? 0 - (uint64_t)*total : (uint64_t)*total;
    do
        *--at = (uint8_t)('0' + rest % 10);
    while (rest /= 10);
    if (*total < 0)
        *--at = '-';
    put(table, slot, (Text){at, (size_t)(text + sizeof text - at)});
    return slot;
}

bool table_add(Store *store, Conn *conn, Text key, int64_t delta, Refusal *refusal)
{
    int64_t total;
    Slot *slot = increase(&store->table, key, delta, &total, refusal);
    if (slot == NULL)
        return false;
    wake(store, slot);
    reply_number(store, conn, (uint64_t)total);
    return true;
}

bool table_barrier(Store *store, Conn *conn, Text key, int64_t world_size, Refusal *refusal)
{
    int64_t total;
    Slot *slot = increase(&store->table, key, 1, &total, refusal);
    if (slot == NULL)
        return false;
    if (total >= world_size) {
        wake(store, slot);
        reply_byte(store, conn, DONE);
    } else {
        table_enlist(&store->table, conn, 1);
        table_enlist_key(&store->table, conn, key);
    }
    return true;
}

void table_num_keys(Store *store, Conn *conn)
{
    reply_number(store, conn, store->table.values);
}

void table_list_keys(Store *store, Conn *conn)
{
    Table *table = &store->table;
    size_t size = 8;
    for (size_t i = 0; i <= table->mask; i++)
        for (Slot *slot = table->buckets[i]; slot != NULL; slot = slot->next)
            size += slot->value ? 8 + slot->size : 0;
    Blob *list = blob_room(size);
    uint64_t length = table->values;
    memcpy(list->bytes, &length, 8);
    list->size = 8;
    for (size_t i = 0; i <= table->mask; i++)
        for (Slot *slot = table->buckets[i]; slot != NULL; slot = slot->next) {
            if (slot->value == NULL)
                continue;
            length = slot->size;
            memcpy(list->bytes + list->size, &length, 8);
            memcpy(list->bytes + list->size + 8, slot->key, slot->size);
            list->size += 8 + slot->size;
        }
    reply_blob(store, conn, list);
    blob_drop(list);
}

void table_delete_key(Store *store, Conn *conn, Text key)
{
    Slot *slot = find(&store->table, key);
    bool there = slot != NULL && slot->value != NULL;
    if (there) {
        blob_drop(slot->value);
        slot->value = NULL;
        store->table.values--;
        tidy(&store->table, slot);
    }
    reply_number(store, conn, there);
}

void table_queue_push(Store *store, Text key, Text value)
{
    Slot *slot = find_or_make(&store->table, key);
    Item *item = claim(NULL, sizeof(Item));
    *item = (Item){.value = blob_new(value.bytes, value.size)};
    *(slot->newest ? &slot->newest->next : &slot->oldest) = item;
    slot->newest = item;
    slot->queued++;
    wake_first(store, slot);
}

void table_queue_pop(Store *store, Conn *conn, Text key)
{
    Slot *slot = find(&store->table, key);
    Item *item = slot ? slot->oldest : NULL;
    reply_number(store, conn, slot ? slot->queued : 0);
    if (item == NULL)
        return;
    slot->oldest = item->next;
    if (slot->oldest == NULL)
        slot->newest = NULL;
    slot->queued--;
    reply_value(store, conn, item->value);
    blob_drop(item->value);
    free(item);
    tidy(&store->table, slot);
}

void table_queue_len(Store *store, Conn *conn, Text key)
{
    Slot *slot = find(&store->table, key);
    reply_number(store, conn, slot ? slot->queued : 0);
}
