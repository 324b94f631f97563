/* Who waits for keys: a line of links at each key, and a block of links at each connection.
 *
 * What is cancelled is only marked; it is taken apart step by step when there is time (`wait_clear`), for it may stand in
 * the lines of a hundred thousand keys.
 */
#include "waiting.h"

#include "replies.h"
#include "wire.h"

#include <stdlib.h>

/* Takes the link out of its key's line; the key may have to be tidied then. */
static void unlink_one(Link *link)
{
    Slot *slot = link->slot;
    *(link->before ? &link->before->after : &slot->first) = link->after;
    *(link->after ? &link->after->before : &slot->last) = link->before;
    link->slot = NULL;
}

bool wait_begin(Store *store, Conn *conn, size_t most)
{
    wait_cancel(store, conn);
    conn->waiting = get_block(NULL, sizeof(Waiting) + most * sizeof(Link));
    if (conn->waiting == NULL)
        return false;
    *conn->waiting = (Waiting){.conn = conn, .missing = 1}; /* one more until it is settled, lest it be over before */
    return true;
}

bool wait_for_key(Store *store, Conn *conn, Text key)
{
    Waiting *waiting = conn->waiting;
    Slot *slot = table_find_or_make(&store->table, key);
    if (slot == NULL)
        return false;
    waiting->missing++;
    if (slot->last != NULL && slot->last->waiting == waiting) { /* named before, and nobody else came between */
        slot->last->times++;
        return true;
    }
    Link *link = &waiting->links[waiting->count++];
    *link = (Link){.before = slot->last, .slot = slot, .waiting = waiting, .times = 1};
    *(slot->last ? &slot->last->after : &slot->first) = link;
    slot->last = link;
    return true;
}

/* So many keys have come. Whether those were the last that were missed. */
static bool less(Store *store, Waiting *waiting, uint64_t times)
{
    waiting->missing -= times;
    if (waiting->missing)
        return false;
    Conn *conn = waiting->conn;
    conn->waiting = NULL;
    free(waiting);
    reply_byte(store, conn, DONE);
    return true;
}

void wait_end_of_keys(Store *store, Conn *conn)
{
    less(store, conn->waiting, 1);
}

void wait_cancel(Store *store, Conn *conn)
{
    if (conn->waiting == NULL)
        return;
    conn->waiting->conn = NULL;
    ring_add(&store->cancelled, &conn->waiting->node);
    conn->waiting = NULL;
}

bool wait_clear(Store *store, size_t steps)
{
    Waiting *waiting;
    while ((waiting = FIRST(&store->cancelled, Waiting, node)) != NULL) {
        for (; waiting->seen < waiting->count; waiting->seen++) {
            if (!steps--)
                return true;
            Link *link = &waiting->links[waiting->seen];
            Slot *slot = link->slot;
            if (slot != NULL) {
                unlink_one(link);
                table_tidy(&store->table, slot);
            }
        }
        ring_remove(&waiting->node);
        free(waiting);
    }
    return false;
}

/* The link's key has come: whether that was the last that its connection missed. */
static bool found(Store *store, Link *link)
{
    Waiting *waiting = link->waiting;
    uint64_t times = link->times;
    unlink_one(link);
    return waiting->conn != NULL && less(store, waiting, times);
}

void wake_all(Store *store, Slot *slot)
{
    while (slot->first != NULL)
        found(store, slot->first);
}

void wake_first(Store *store, Slot *slot)
{
    while (slot->first != NULL && !found(store, slot->first))
        ;
}
