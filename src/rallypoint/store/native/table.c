/* What the requests mean: keys, queues and barriers, under the laws of `table.py`. */
#include "core.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum { FIRST_BUCKETS = 4, SHARD_SHIFT = 64 - 10 };
_Static_assert(SHARDS == 1 << (64 - SHARD_SHIFT), "a name's part is told by the highest bits of its hash");

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
    for (size_t i = 0; i < SHARDS; i++) {
        Shard *shard = &table->shards[i];
        for (size_t j = 0; shard->buckets != NULL && j <= shard->mask; j++)
            while (shard->buckets[j] != NULL) {
                Slot *slot = shard->buckets[j];
                shard->buckets[j] = slot->next;
                blob_drop(slot->value);
                items_free(slot);
                free(slot);
            }
        free(shard->buckets);
        shard->buckets = NULL;
    }
}

static Slot *find_hashed(const Shard *shard, Text key, uint64_t hashed)
{
    if (shard->buckets == NULL)
        return NULL;
    Slot *slot = shard->buckets[hashed & shard->mask];
    while (slot != NULL && (slot->hash != hashed || slot->size != key.size || memcmp(slot->key, key.bytes, key.size)))
        slot = slot->next;
    return slot;
}

Slot *table_find(const Table *table, Text key)
{
    uint64_t hashed = hash(table, key);
    return find_hashed(&table->shards[hashed >> SHARD_SHIFT], key, hashed);
}

/* More buckets. Where there is no memory for them, the present ones do, more slowly; only the first are needed. */
static bool grow(Shard *shard)
{
    size_t old = shard->buckets == NULL ? 0 : shard->mask + 1, count = old ? 2 * old : FIRST_BUCKETS;
    Slot **buckets = get_block(NULL, count * sizeof(Slot *));
    if (buckets == NULL)
        return old > 0;
    memset(buckets, 0, count * sizeof(Slot *));
    for (size_t i = 0; i < old; i++)
        for (Slot *slot = shard->buckets[i], *next; slot != NULL; slot = next) {
            Slot **bucket = &buckets[slot->hash & (count - 1)];
            next = slot->next;
            slot->next = *bucket;
            *bucket = slot;
        }
    free(shard->buckets);
    shard->buckets = buckets;
    shard->mask = count - 1;
    return true;
}

Slot *table_find_or_make(Table *table, Text key)
{
    uint64_t hashed = hash(table, key);
    Shard *shard = &table->shards[hashed >> SHARD_SHIFT];
    Slot *slot = find_hashed(shard, key, hashed);
    if (slot != NULL)
        return slot;
    if ((shard->buckets == NULL || shard->slots > shard->mask) && !grow(shard))
        return NULL;
    slot = get_block(NULL, sizeof(Slot) + key.size);
    if (slot == NULL)
        return NULL;
    Slot **bucket = &shard->buckets[hashed & shard->mask];
    *slot = (Slot){.next = *bucket, .hash = hashed, .size = key.size};
    if (key.size)
        memcpy(slot->key, key.bytes, key.size);
    *bucket = slot;
    shard->slots++;
    return slot;
}

/* A name of which nothing is left is forgotten. */
void table_tidy(Table *table, Slot *slot)
{
    if (slot->value != NULL || slot->oldest != NULL || slot->first != NULL)
        return;
    Shard *shard = &table->shards[slot->hash >> SHARD_SHIFT];
    Slot **at = &shard->buckets[slot->hash & shard->mask];
    while (*at != slot)
        at = &(*at)->next;
    *at = slot->next;
    free(slot);
    shard->slots--;
}

/* Of what goes by this name so many bytes have gone and come; it may have been nothing, or be nothing now. */
static void count(Table *table, const Slot *slot, bool was_there, size_t gone, size_t come)
{
    bool is_there = slot->value != NULL || slot->oldest != NULL;
    table->bytes += come - gone;
    if (is_there && !was_there) {
        table->keys++;
        table->bytes += slot->size + OVERHEAD;
    } else if (was_there && !is_there) {
        table->keys--;
        table->bytes -= slot->size + OVERHEAD;
    }
}

static bool no_memory(Store *store, Slot *slot, Refusal *refusal)
{
    if (slot != NULL)
        table_tidy(&store->table, slot);
    refusal->reason = NO_MEMORY;
    return false;
}

/* Makes what `made` says the slot's value; false if that is nothing, for which there was no memory. */
static bool put(Store *store, Slot *slot, Blob *(*make)(Blob *, Text, uint64_t), Text text)
{
    bool was_there = slot->value != NULL || slot->oldest != NULL, born = slot->value == NULL;
    size_t before = born ? 0 : slot->value->size;
    if (born)
        list_freeze(store, slot->hash >> SHARD_SHIFT);
    Blob *made = make(slot->value, text, store->limits.value);
    if (made == NULL)
        return false;
    slot->value = made;
    store->table.values += born;
    count(&store->table, slot, was_there, before, made->size);
    return true;
}

static Blob *as_it_is(Blob *old, Text value, uint64_t limit)
{
    (void)limit;
    return blob_assign(old, value);
}

bool table_set(Store *store, Conn *conn, Text key, Text value, Refusal *refusal)
{
    (void)conn;
    Slot *slot = table_find_or_make(&store->table, key);
    if (slot == NULL || !put(store, slot, as_it_is, value))
        return no_memory(store, slot, refusal);
    wake_all(store, slot);
    return true;
}

bool table_append(Store *store, Conn *conn, Text key, Text value, Refusal *refusal)
{
    (void)conn;
    Slot *slot = table_find_or_make(&store->table, key);
    if (slot == NULL)
        return no_memory(store, slot, refusal);
    size_t size = (slot->value ? slot->value->size : 0) + value.size;
    if (size > store->limits.value) {
        table_tidy(&store->table, slot);
        *refusal = (Refusal){.reason = GROWN_VALUE, .number = size};
        return false;
    }
    if (!put(store, slot, blob_extend, value))
        return no_memory(store, slot, refusal);
    wake_all(store, slot);
    return true;
}

/* Where the key is missing and something was expected, the protocol gives back what was expected. */
static bool reply_expected(Store *store, Conn *conn, Text expected, Refusal *refusal)
{
    Blob *blob = blob_new(expected);
    if (blob == NULL)
        return no_memory(store, NULL, refusal);
    reply_value(store, conn, blob);
    blob_drop(blob);
    return true;
}

bool table_compare_set(Store *store, Conn *conn, Text key, Text expected, Text desired, Refusal *refusal)
{
    Slot *slot = table_find(&store->table, key);
    Blob *present = slot ? slot->value : NULL;
    size_t size = present ? present->size : 0;
    if (expected.size == size && (size == 0 || memcmp(expected.bytes, present->bytes, size) == 0)) {
        if (slot == NULL)
            slot = table_find_or_make(&store->table, key);
        if (slot == NULL || !put(store, slot, as_it_is, desired))
            return no_memory(store, slot, refusal);
        present = slot->value;
    }
    if (slot != NULL)
        wake_all(store, slot);
    bool fine = true;
    if (present != NULL)
        reply_value(store, conn, present);
    else
        fine = reply_expected(store, conn, expected, refusal);
    if (slot != NULL)
        table_tidy(&store->table, slot);
    return fine;
}

void table_get(Store *store, Conn *conn, Text key)
{
    Slot *slot = table_find(&store->table, key);
    reply_value(store, conn, slot ? slot->value : NULL);
}

bool table_has_value(const Table *table, Text key)
{
    Slot *slot = table_find(table, key);
    return slot != NULL && slot->value != NULL;
}

bool table_has(const Table *table, Text key)
{
    Slot *slot = table_find(table, key);
    return slot != NULL && (slot->value != NULL || slot->oldest != NULL);
}

/* The decimal number at the beginning, as strtoll reads it: blanks before, anything behind. False if there is none. */
static bool number(const Blob *text, int64_t *result)
{
    const uint8_t *at = text->bytes, *end = at + (text->size < MAX_NUMBER ? text->size : MAX_NUMBER);
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

static Slot *increase(Store *store, Text key, int64_t delta, int64_t *total, Refusal *refusal)
{
    Slot *slot = table_find_or_make(&store->table, key);
    int64_t present = 0;
    if (slot != NULL && slot->value != NULL && !number(slot->value, &present)) {
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
    if (slot == NULL || !put(store, slot, as_it_is, (Text){at, (size_t)(text + sizeof text - at)})) {
        no_memory(store, slot, refusal);
        return NULL;
    }
    return slot;
}

bool table_add(Store *store, Conn *conn, Text key, int64_t delta, Refusal *refusal)
{
    int64_t total;
    Slot *slot = increase(store, key, delta, &total, refusal);
    if (slot == NULL)
        return false;
    wake_all(store, slot);
    reply_number(store, conn, (uint64_t)total);
    return true;
}

bool table_barrier(Store *store, Conn *conn, Text key, int64_t world_size, Refusal *refusal)
{
    int64_t total;
    Slot *slot = increase(store, key, 1, &total, refusal);
    if (slot == NULL)
        return false;
    if (total >= world_size) {
        wake_all(store, slot);
        reply_byte(store, conn, DONE);
        return true;
    }
    if (!wait_begin(store, conn, 1) || !wait_for_key(store, conn, key))
        return no_memory(store, NULL, refusal);
    wait_settle(store, conn);
    return true;
}

void table_num_keys(Store *store, Conn *conn)
{
    reply_number(store, conn, store->table.values);
}

void table_delete_key(Store *store, Conn *conn, Text key)
{
    Slot *slot = table_find(&store->table, key);
    bool there = slot != NULL && slot->value != NULL;
    if (there) {
        list_freeze(store, slot->hash >> SHARD_SHIFT);
        size_t size = slot->value->size;
        blob_drop(slot->value);
        slot->value = NULL;
        store->table.values--;
        count(&store->table, slot, true, size, 0);
        table_tidy(&store->table, slot);
    }
    reply_number(store, conn, there);
}

bool table_queue_push(Store *store, Conn *conn, Text key, Text value, Refusal *refusal)
{
    (void)conn;
    Slot *slot = table_find_or_make(&store->table, key);
    Item *item = get_block(NULL, sizeof(Item));
    Blob *blob = blob_new(value);
    if (slot == NULL || item == NULL || blob == NULL) {
        free(item);
        blob_drop(blob);
        return no_memory(store, slot, refusal);
    }
    bool was_there = slot->value != NULL || slot->oldest != NULL;
    *item = (Item){.value = blob};
    *(slot->newest ? &slot->newest->next : &slot->oldest) = item;
    slot->newest = item;
    slot->queued++;
    count(&store->table, slot, was_there, 0, blob->size + OVERHEAD);
    wake_first(store, slot);
    return true;
}

void table_queue_pop(Store *store, Conn *conn, Text key)
{
    Slot *slot = table_find(&store->table, key);
    Item *item = slot ? slot->oldest : NULL;
    reply_number(store, conn, slot ? slot->queued : 0);
    if (item == NULL)
        return;
    slot->oldest = item->next;
    if (slot->oldest == NULL)
        slot->newest = NULL;
    slot->queued--;
    reply_value(store, conn, item->value);
    count(&store->table, slot, true, item->value->size + OVERHEAD, 0);
    blob_drop(item->value);
    free(item);
    table_tidy(&store->table, slot);
}

void table_queue_len(Store *store, Conn *conn, Text key)
{
    Slot *slot = table_find(&store->table, key);
    reply_number(store, conn, slot ? slot->queued : 0);
}
