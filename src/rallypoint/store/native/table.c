/* The names of a store: a hash table in parts. */
#include "table.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum { FIRST_BUCKETS = 4, SHARD_SHIFT = 64 - 10 };
_Static_assert(SHARDS == 1 << (64 - SHARD_SHIFT), "a name's part is told by the highest bits of its hash");

/* SipHash-1-3 with a secret: a client cannot choose keys that all fall into one bucket. */
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
        abort(); /* so few bytes always come at once */
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

/* Adds buckets. Without memory, the present ones suffice, more slowly; only the first are required. */
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
    ring_open(&slot->waiters);
    if (key.size)
        memcpy(slot->key, key.bytes, key.size);
    *bucket = slot;
    shard->slots++;
    return slot;
}

/* Removes a name with nothing left. */
void table_tidy(Table *table, Slot *slot)
{
    if (slot->value != NULL || slot->oldest != NULL || !ring_is_empty(&slot->waiters))
        return;
    Shard *shard = &table->shards[slot->hash >> SHARD_SHIFT];
    Slot **at = &shard->buckets[slot->hash & shard->mask];
    while (*at != slot)
        at = &(*at)->next;
    *at = slot->next;
    free(slot);
    shard->slots--;
}

size_t table_shard(const Slot *slot)
{
    return slot->hash >> SHARD_SHIFT;
}
