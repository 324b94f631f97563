/* The store as a whole: open, poll for ready connections, close.
 *
 * Some connections are read and served, then all replies to them are sent. They are few enough for their sockets to be
 * still in the processor's caches, and so many that a client that slept finds several replies when it wakes.
 */
#include "polling.h"

#include "accepting.h"
#include "connections.h"
#include "input.h"
#include "replies.h"
#include "waiting.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

static const uint64_t MILLISECOND = 1000000;

enum {
    MOST_EVENTS = 1024, /* connections looked at in one poll */
    AT_ONCE = 64,       /* connections served before replies are sent */
    WOKEN = SLICE / 4,  /* connections woken in one poll, after those that a request woke at once */
};

static void end_unvalidated(Store *store, uint64_t at)
{
    Conn *conn;
    uint64_t timeout = store->limits.greeting;
    for (int i = 0; timeout && i < AT_ONCE && (conn = FIRST(&store->unvalidated, Conn, unvalidated)) != NULL; i++) {
        if (at - conn->since < timeout)
            return;
        conn_refuse(store, conn, &(Refusal){.reason = SILENT});
    }
}

/* The number of milliseconds until there is work that no event reports. */
static int pause_of(const Store *store, uint64_t at)
{
    uint64_t next = UINT64_MAX;
    const Conn *oldest = FIRST(&store->unvalidated, Conn, unvalidated);
    if (oldest != NULL && store->limits.greeting)
        next = oldest->since + store->limits.greeting;
    if (store->accept_again_at && store->accept_again_at < next)
        next = store->accept_again_at;
    if (next == UINT64_MAX)
        return -1;
    uint64_t left = at < next ? (next - at) / MILLISECOND + 1 : 0;
    return left < INT32_MAX ? (int)left : INT32_MAX;
}

static bool has_work(Store *store)
{
    return !ring_is_empty(&store->busy) || !ring_is_empty(&store->held) || !ring_is_empty(&store->waking) ||
        !ring_is_empty(&store->cancelled);
}

static void on_event(Store *store, const struct epoll_event *event)
{
    uint64_t times;
    Conn *conn = event->data.ptr;
    if (event->data.ptr == &store->listener)
        accept_all(store);
    else if (event->data.ptr == &store->wake)
        store->woken = read(store->wake, &times, sizeof times) > 0;
    else if (conn->doomed.after == NULL)
        conn_ready(store, conn, event->events);
}

bool poll_once(Store *store, bool may_wait)
{
    struct epoll_event events[MOST_EVENTS];
    bool work = has_work(store);
    int count = epoll_wait(store->epoll, events, MOST_EVENTS, may_wait && !work ? pause_of(store, monotonic_now()) : 0);
    for (int i = 0; i < count; i++) {
        on_event(store, &events[i]);
        if ((i + 1) % AT_ONCE == 0)
            flush(store);
    }
    if (work) {
        wake_more(store, WOKEN + (size_t)(count > 0 ? count : 0)); /* not fewer than may have begun to wait */
        serve_busy(store);
    }
    close_doomed(store);
    wait_clear(store, SLICE);
    uint64_t at = monotonic_now();
    end_unvalidated(store, at);
    close_doomed(store);
    bool room = store->conn_count < store->limits.connections;
    if (store->accept_again_at && ((store->at_connection_limit && room) || at >= store->accept_again_at))
        accept_again(store);
    return count > 0 || work || has_work(store);
}

int conn_add(Store *store, int fd, Text data)
{
    Reason refused = why_refused(store, fd);
    if (refused) {
        store->refused(store, fd, &(Refusal){.reason = refused});
        return EPERM;
    }
    if (!conn_open(store, fd))
        return errno;
    if (data.size)
        conn_serve(store, MEMBER(store->all.before, Conn, all), data);
    close_doomed(store);
    return 0;
}

int store_open(Store *store)
{
    ring_open(&store->all);
    ring_open(&store->unvalidated);
    ring_open(&store->busy);
    ring_open(&store->doomed);
    ring_open(&store->held);
    ring_open(&store->waking);
    ring_open(&store->cancelled);
    ring_open(&store->listings);
    store->out = get_block(NULL, OUT_ROOM);
    store->segments = get_block(NULL, OUT_SEGMENTS * sizeof(Segment));
    store->intake = get_block(NULL, PIECE);
    store->epoll = epoll_create1(EPOLL_CLOEXEC);
    bool enough = store->out != NULL && store->segments != NULL && store->intake != NULL;
    if (!enough)
        errno = ENOMEM;
    if (enough && store->epoll >= 0 && store_watch(store, store->wake, &store->wake) &&
        (store->listener < 0 || store_watch(store, store->listener, &store->listener))) {
        table_open(&store->table);
        return 0;
    }
    int error = errno;
    if (store->epoll >= 0)
        close(store->epoll);
    free(store->out);
    free(store->segments);
    free(store->intake);
    errno = error;
    return -1;
}

void store_close(Store *store)
{
    Conn *conn;
    flush(store);
    while ((conn = FIRST(&store->all, Conn, all)) != NULL) {
        conn->failed = false;
        conn_close(store, conn);
    }
    close(store->epoll);
}

void store_free(Store *store)
{
    while (wait_clear(store, SIZE_MAX))
        ;
    table_close(&store->table);
    free(store->out);
    free(store->segments);
    free(store->intake);
    free(store->peers);
}
