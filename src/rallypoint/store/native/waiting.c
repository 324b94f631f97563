/* Waits for keys: a line of links at each key, and a block of links at each connection.
 *
 * A hundred thousand connections may wait for one key. The connection that sets it wakes as many as its slice allows.
 * The others move from the key's line to `waking` at once, and each poll wakes some: later changes of the key do not
 * concern them. Law: a connection gets its replies in the order of its requests. So a waiting connection gets that
 * reply before any other, and is not served (`held`) while anybody is still to be woken.
 *
 * A cancelled wait is only marked. It is taken apart step by step when there is time (`wait_clear`), since it may be in
 * the lines of a hundred thousand keys.
 */
#include "waiting.h"

#include "replies.h"
#include "wire.h"

#include <stdlib.h>

enum { WAKE = 16 }; /* steps counted for a reply to another connection, which needs its own system call */

bool wait_begin(Store *store, Conn *conn, size_t most)
{
    wait_cancel(store, conn);
    conn->waiting = get_block(NULL, sizeof(Waiting) + most * sizeof(Link));
    if (conn->waiting == NULL)
        return false;
    *conn->waiting = (Waiting){.conn = conn, .missing = 1}; /* one extra until all are named, or it might end early */
    return true;
}

bool wait_for_key(Store *store, Conn *conn, Text key)
{
    Waiting *waiting = conn->waiting;
    Slot *slot = table_find_or_make(&store->table, key);
    if (slot == NULL)
        return false;
    waiting->missing++;
    Link *last = ring_is_empty(&slot->waiters) ? NULL : MEMBER(slot->waiters.before, Link, line);
    if (last != NULL && last->waiting == waiting) { /* the same key, named twice in a row */
        last->times++;
        return true;
    }
    Link *link = &waiting->links[waiting->count++];
    *link = (Link){.slot = slot, .waiting = waiting, .times = 1};
    ring_add(&slot->waiters, &link->line);
    return true;
}

/* This many keys were set. Returns whether none is missing now. */
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

bool wait_must_pause(const Store *store, const Conn *conn)
{
    return conn->waiting != NULL && !ring_is_empty(&store->waking);
}

/* Takes the link out of its line; if that was a key's, the key may have nothing left. */
static void leave_line(Store *store, Link *link)
{
    Node *rest = link->line.after;
    if (rest == NULL)
        return;
    bool last = rest == link->line.before;
    ring_remove(&link->line);
    if (last && rest != &store->waking)
        table_tidy(&store->table, MEMBER(rest, Slot, waiters));
}

bool wait_clear(Store *store, size_t steps)
{
    Waiting *waiting;
    while ((waiting = FIRST(&store->cancelled, Waiting, node)) != NULL) {
        for (; waiting->seen < waiting->count; waiting->seen++) {
            if (!steps--)
                return true;
            leave_line(store, &waiting->links[waiting->seen]);
        }
        ring_remove(&waiting->node);
        free(waiting);
    }
    return false;
}

/* The link's key was set. Returns whether its connection misses no other. */
static bool found(Store *store, Link *link)
{
    Waiting *waiting = link->waiting;
    uint64_t times = link->times;
    ring_remove(&link->line);
    bool over = waiting->conn != NULL && less(store, waiting, times);
    store->steps += over ? WAKE : 1;
    return over;
}

/* Wakes the connection itself if it waits for the key that it has changed. */
static void wake_own(Store *store, Waiting *waiting, const Slot *slot)
{
    store->steps += waiting->count / WAKE;
    for (size_t i = 0; i < waiting->count; i++) {
        Link *link = &waiting->links[i];
        if (link->slot == slot && link->line.after != NULL && found(store, link))
            return;
    }
}

void wake_all(Store *store, Conn *conn, Slot *slot)
{
    Link *link;
    if (conn->waiting != NULL)
        wake_own(store, conn->waiting, slot);
    while (store->steps < SLICE && (link = FIRST(&slot->waiters, Link, line)) != NULL)
        found(store, link);
    ring_move(&store->waking, &slot->waiters);
}

void wake_more(Store *store, size_t most)
{
    Link *link;
    store->steps = 0;
    while (store->steps < most * WAKE && (link = FIRST(&store->waking, Link, line)) != NULL)
        found(store, link);
    if (ring_is_empty(&store->waking))
        ring_move(&store->busy, &store->held);
}

void wake_first(Store *store, Slot *slot)
{
    Link *link;
    while ((link = FIRST(&slot->waiters, Link, line)) != NULL && !found(store, link))
        ;
}
