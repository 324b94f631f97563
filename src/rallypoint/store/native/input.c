/* Reads input, and serves it in time slices.
 *
 * A connection with more work than a slice (`SLICE`) waits among the busy ones. They have their turns after all events
 * were handled, a few milliseconds in each poll; nothing is read from the client until then.
 *
 * Events are reported once, on a change (EPOLLET), and for both directions. So code that stops reading before the input
 * is empty must request the event again (`conn_rearm`), and the end of the client's output (EPOLLRDHUP) is checked as
 * soon as it is reported.
 */
#define _GNU_SOURCE /* EPOLLRDHUP */
#include "input.h"

#include "connections.h"
#include "replies.h"
#include "requests.h"
#include "waiting.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

static const uint32_t GOING = EPOLLRDHUP | EPOLLHUP | EPOLLERR;
static const uint64_t BUSY_TIME = 2000000;

enum { FIRST_INPUT = 256, LEAST_READ = 4096, MOST_READ = 1024 * 1024 };

static void no_memory(Store *store, Conn *conn)
{
    conn_refuse(store, conn, &(Refusal){.reason = NO_MEMORY});
}

/* Keeps the rest of these bytes, which are in the connection's own input or the store's intake. */
static void conn_keep(Store *store, Conn *conn, Text left)
{
    if (left.size == 0)
        conn_input_free(conn); /* an idle connection must not keep the last large value */
    else if (conn->input != NULL)
        conn->input_at = conn->input_size - left.size;
    else {
        size_t room = left.size < FIRST_INPUT ? FIRST_INPUT : left.size;
        conn->input = get_block(NULL, room);
        if (conn->input == NULL) {
            no_memory(store, conn);
            return;
        }
        memcpy(conn->input, left.bytes, left.size);
        conn->input_room = room;
        conn->input_size = left.size;
    }
}

/* Serves these bytes, and keeps the rest. */
void conn_serve(Store *store, Conn *conn, Text data)
{
    Refusal refusal = {.reason = REFUSE_NOTHING};
    size_t used = serve(store, conn, data, &refusal);
    if (refusal.reason != REFUSE_NOTHING) {
        conn_refuse(store, conn, &refusal);
        return;
    }
    conn_keep(store, conn, (Text){data.bytes + used, data.size - used});
    if (conn->over || conn->full)
        return;
    bool pause = wait_must_pause(store, conn), more = conn->input != NULL || conn->listing != NULL;
    if ((pause || store->steps >= SLICE) && more && !conn->want && conn->busy.after == NULL)
        ring_add(pause ? &store->held : &store->busy, &conn->busy);
}

static void serve_input(Store *store, Conn *conn)
{
    const uint8_t *bytes = conn->input != NULL ? conn->input + conn->input_at : store->intake;
    conn_serve(store, conn, (Text){bytes, conn->input_size - conn->input_at});
}

/* Makes room for this many bytes after the input. */
static bool input_grow(Conn *conn, size_t room)
{
    if (conn->input_room - conn->input_size >= room)
        return true;
    if (conn->input_at) {
        memmove(conn->input, conn->input + conn->input_at, conn->input_size - conn->input_at);
        conn->input_size -= conn->input_at;
        conn->input_at = 0;
    }
    if (conn->input_room - conn->input_size >= room)
        return true;
    uint8_t *input = get_block(conn->input, conn->input_size + room);
    if (input == NULL)
        return false;
    conn->input = input;
    conn->input_room = conn->input_size + room;
    return true;
}

/* Reads once, and serves the complete requests. Returns whether there may be more to read. */
static bool conn_read(Store *store, Conn *conn)
{
    uint8_t *into = store->intake;
    size_t room = PIECE, held = conn->input_size - conn->input_at;
    if (held) { /* read the rest of a request into place, at most doubling the input */
        room = conn->want > held ? conn->want - held : 0;
        if (room > held + PIECE)
            room = held + PIECE;
        if (room < LEAST_READ)
            room = LEAST_READ;
        if (!input_grow(conn, room)) {
            no_memory(store, conn);
            return false;
        }
        into = conn->input + conn->input_size;
        if (room > MOST_READ)
            room = MOST_READ;
    }
    ssize_t size = recv(conn->fd, into, room, MSG_DONTWAIT);
    if (size < 0) {
        if (errno == EINTR)
            return true;
        if (errno == EAGAIN || errno == EWOULDBLOCK)
            return false;
    }
    if (size <= 0) {
        conn_doom(store, conn);
        return false;
    }
    if (held) {
        conn->input_size += (size_t)size;
        if (held + (size_t)size >= conn->want)
            serve_input(store, conn);
    } else
        conn_serve(store, conn, (Text){into, (size_t)size});
    return (size_t)size == room;
}

/* The kernel has room for replies again. */
static void conn_resume(Store *store, Conn *conn, uint32_t events)
{
    replies_resume(store, conn);
    if (conn->full) {
        if (events & (EPOLLHUP | EPOLLERR))
            conn_doom(store, conn);
        return;
    }
    if (conn->over) {
        conn_doom(store, conn);
        return;
    }
    if (conn->input != NULL || conn->listing != NULL)
        serve_input(store, conn);
    if (!conn->over)
        conn_rearm(store, conn); /* newer input was not read */
}

static bool is_busy(const Conn *conn)
{
    return conn->busy.after != NULL;
}

void conn_ready(Store *store, Conn *conn, uint32_t events)
{
    if (conn->full) {
        conn_resume(store, conn, events);
        return;
    }
    if (is_busy(conn)) {
        if (events & (EPOLLHUP | EPOLLERR))
            conn_doom(store, conn);
        return;
    }
    if (!(events & (EPOLLIN | GOING)))
        return;
    for (;;) {
        bool more = conn_read(store, conn);
        if (conn->over || conn->full || is_busy(conn))
            return;
        if (more) {
            conn_rearm(store, conn); /* others first */
            return;
        }
        if (!(events & GOING))
            return;
        /* If the client is leaving, its end may come right after the bytes just read. */
        char end;
        if (recv(conn->fd, &end, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
    }
}

/* Gives the busy connections their turns, one after the other, for some time. */
void serve_busy(Store *store)
{
    Conn *conn;
    for (uint64_t end = monotonic_now() + BUSY_TIME; (conn = FIRST(&store->busy, Conn, busy)) != NULL;) {
        ring_remove(&conn->busy);
        serve_input(store, conn);
        if (!conn->over && !conn->full && !is_busy(conn))
            conn_rearm(store, conn); /* newer input was not read */
        if (monotonic_now() >= end)
            return;
    }
}
