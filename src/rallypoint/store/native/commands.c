/* Executes requests: keys, queues and barriers, under the laws of `plain.py`. */
#include "commands.h"

#include "listing.h"
#include "replies.h"
#include "waiting.h"
#include "wire.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_NUMBER = 4096 }; /* bytes of a value searched for a number */

/* Updates the counts after a name's bytes have changed; the name may be new, or have nothing left. */
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

/* Sets the slot's value to the result of `make`; false if there is no memory. */
static bool put(Store *store, Slot *slot, Blob *(*make)(Blob *, Text, uint64_t), Text text)
{
    bool was_there = slot->value != NULL || slot->oldest != NULL, born = slot->value == NULL;
    size_t before = born ? 0 : slot->value->size;
    if (born)
        list_keep_snapshot(store, table_shard(slot));
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

bool command_set(Store *store, Conn *conn, Text key, Text value, Refusal *refusal)
{
    Slot *slot = table_find_or_make(&store->table, key);
    if (slot == NULL || !put(store, slot, as_it_is, value))
        return no_memory(store, slot, refusal);
    wake_all(store, conn, slot);
    return true;
}

bool command_append(Store *store, Conn *conn, Text key, Text value, Refusal *refusal)
{
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
    wake_all(store, conn, slot);
    return true;
}

/* If the key is missing and a value was expected, the protocol returns the expected value. */
static bool reply_expected(Store *store, Conn *conn, Text expected, Refusal *refusal)
{
    Blob *blob = blob_new(expected);
    if (blob == NULL)
        return no_memory(store, NULL, refusal);
    reply_value(store, conn, blob);
    blob_drop(blob);
    return true;
}

bool command_compare_set(Store *store, Conn *conn, Text key, Text expected, Text desired, Refusal *refusal)
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
        wake_all(store, conn, slot);
    bool fine = true;
    if (present != NULL)
        reply_value(store, conn, present);
    else
        fine = reply_expected(store, conn, expected, refusal);
    if (slot != NULL)
        table_tidy(&store->table, slot);
    return fine;
}

void command_get(Store *store, Conn *conn, Text key)
{
    Slot *slot = table_find(&store->table, key);
    reply_value(store, conn, slot ? slot->value : NULL);
}

bool command_has_value(const Table *table, Text key)
{
    Slot *slot = table_find(table, key);
    return slot != NULL && slot->value != NULL;
}

bool command_has(const Table *table, Text key)
{
    Slot *slot = table_find(table, key);
    return slot != NULL && (slot->value != NULL || slot->oldest != NULL);
}

/* The decimal number at the beginning, as strtoll reads it: blanks before, anything after. False if there is none. */
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
    *total = (int64_t)((uint64_t)present + (uint64_t)delta); /* wraps around after the highest number */
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

bool command_add(Store *store, Conn *conn, Text key, int64_t delta, Refusal *refusal)
{
    int64_t total;
    Slot *slot = increase(store, key, delta, &total, refusal);
    if (slot == NULL)
        return false;
    wake_all(store, conn, slot);
    reply_number(store, conn, (uint64_t)total);
    return true;
}

bool command_barrier(Store *store, Conn *conn, Text key, int64_t world_size, Refusal *refusal)
{
    int64_t total;
    Slot *slot = increase(store, key, 1, &total, refusal);
    if (slot == NULL)
        return false;
    if (total >= world_size) {
        wake_all(store, conn, slot);
        reply_byte(store, conn, DONE);
        return true;
    }
    if (!wait_begin(store, conn, 1) || !wait_for_key(store, conn, key))
        return no_memory(store, NULL, refusal);
    wait_end_of_keys(store, conn);
    return true;
}

void command_num_keys(Store *store, Conn *conn)
{
    reply_number(store, conn, store->table.values);
}

void command_delete_key(Store *store, Conn *conn, Text key)
{
    Slot *slot = table_find(&store->table, key);
    bool there = slot != NULL && slot->value != NULL;
    if (there) {
        list_keep_snapshot(store, table_shard(slot));
        size_t size = slot->value->size;
        blob_drop(slot->value);
        slot->value = NULL;
        store->table.values--;
        count(&store->table, slot, true, size, 0);
        table_tidy(&store->table, slot);
    }
    reply_number(store, conn, there);
}

bool command_queue_push(Store *store, Conn *conn, Text key, Text value, Refusal *refusal)
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

void command_queue_pop(Store *store, Conn *conn, Text key)
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

void command_queue_len(Store *store, Conn *conn, Text key)
{
    Slot *slot = table_find(&store->table, key);
    reply_number(store, conn, slot ? slot->queued : 0);
}
