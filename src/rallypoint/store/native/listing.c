/* Lists of all keys, sent one part of the table after another: a snapshot from when the list was requested.
 *
 * A list has no copy of an unchanged part. Before a part changes, all lists that still have to send it get its names,
 * one copy for all of them (`list_keep_snapshot`).
 */
#include "listing.h"

#include "replies.h"

#include <stdlib.h>
#include <string.h>

static const Shard *shard_of(const Store *store, size_t at)
{
    return &store->table.shards[at];
}

/* Calls `take` with each name of a part, and returns their number. */
static size_t names(const Shard *shard, void (*take)(void *, const Slot *), void *with)
{
    size_t count = 0;
    for (size_t i = 0; shard->buckets != NULL && i <= shard->mask; i++)
        for (const Slot *slot = shard->buckets[i]; slot != NULL; slot = slot->next)
            if (slot->value != NULL) {
                take(with, slot);
                count++;
            }
    return count;
}

static void measure(void *with, const Slot *slot)
{
    *(size_t *)with += 8 + slot->size;
}

static void copy(void *with, const Slot *slot)
{
    Blob *blob = with;
    uint64_t size = slot->size;
    memcpy(blob->bytes + blob->size, &size, 8);
    memcpy(blob->bytes + blob->size + 8, slot->key, slot->size);
    blob->size += 8 + slot->size;
}

static Blob *names_of(const Shard *shard, size_t *count)
{
    size_t size = 0;
    *count = names(shard, measure, &size);
    Blob *blob = blob_room(size);
    if (blob != NULL)
        names(shard, copy, blob);
    return blob;
}

bool list_begin(Store *store, Conn *conn)
{
    Listing *listing = get_block(NULL, sizeof(Listing));
    if (listing == NULL)
        return false;
    *listing = (Listing){.conn = conn, .number = ++store->listing_number};
    ring_add(store->listings.after, &listing->node);
    conn->listing = listing;
    reply_number(store, conn, store->table.values);
    return true;
}

void list_end(Conn *conn)
{
    Listing *listing = conn->listing;
    if (listing == NULL)
        return;
    conn->listing = NULL;
    ring_remove(&listing->node);
    for (size_t i = 0; listing->names != NULL && i < SHARDS; i++)
        blob_drop(listing->names[i]);
    free(listing->names);
    free(listing);
}

/* The names of the next part; the caller owns a reference. */
static Blob *next_names(Store *store, Listing *listing)
{
    size_t count = 0, at = listing->at++;
    Blob *kept = listing->names != NULL ? listing->names[at] : NULL;
    if (kept != NULL) {
        listing->names[at] = NULL;
        return kept;
    }
    Blob *made = names_of(shard_of(store, at), &count);
    store->steps += count;
    return made;
}

void list_some(Store *store, Conn *conn)
{
    Listing *listing = conn->listing;
    while (listing->at < SHARDS && !conn->reading_stopped) {
        if (shard_of(store, listing->at)->slots == 0 && listing->names == NULL) {
            listing->at++;
            continue;
        }
        Blob *names = next_names(store, listing);
        if (names == NULL) {
            conn_fail(store, conn);
            return;
        }
        reply_blob(store, conn, names);
        blob_drop(names);
        if (store->owed >= BLOCK)
            flush(store);
        if (conn->failed || conn->full || store->steps >= SLICE)
            return;
    }
    list_end(conn);
}

/* Gives a listing the names of a part, if there is memory for them. */
static void give(Store *store, Listing *listing, size_t shard, Blob *names)
{
    if (names != NULL && listing->names == NULL) {
        listing->names = get_block(NULL, SHARDS * sizeof(Blob *));
        if (listing->names != NULL)
            memset(listing->names, 0, SHARDS * sizeof(Blob *));
    }
    if (names == NULL || listing->names == NULL)
        conn_fail(store, listing->conn);
    else
        listing->names[shard] = blob_hold(names);
}

void list_keep_snapshot(Store *store, size_t at)
{
    Shard *shard = &store->table.shards[at];
    Node *node = store->listings.after;
    if (node == &store->listings || MEMBER(node, Listing, node)->number <= shard->listed)
        return;
    size_t count;
    Blob *names = names_of(shard, &count);
    while (node != &store->listings) {
        Listing *listing = MEMBER(node, Listing, node);
        if (listing->number <= shard->listed)
            break; /* this and all older lists got the names before an earlier change */
        node = node->after;
        if (listing->at <= at)
            give(store, listing, at, names);
    }
    shard->listed = store->listing_number;
    blob_drop(names);
}
