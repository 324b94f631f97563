/* Connections, in one epoll set.
 *
 * Some connections are read and served, then all that they have earned is sent: few enough that their sockets are still
 * in the processor's caches, and so many that clients who were asleep find several replies when they wake. Laws:
 *
 * - before a connection is closed, all replies are flushed: no segment names one that has gone;
 * - a connection is closed only while its own event is looked at, and has one event in a sweep at most.
 *
 * Events are told once, when something changes (EPOLLET), and for both directions; so whoever stops reading before
 * there was nothing left must ask to be told again (`conn_rearm`), and that the client has finished (EPOLLRDHUP) is
 * looked for as soon as it is told.
 */
#define _GNU_SOURCE /* accept4 */
#include "core.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static const uint32_t EDGES = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
static const uint32_t GOING = EPOLLRDHUP | EPOLLHUP | EPOLLERR;

enum { FIRST_INPUT = 256, LEAST_READ = 4096 };

static bool conn_open(Store *store, int fd)
{
    Conn *conn = claim(NULL, sizeof(Conn));
    memset(conn, 0, sizeof(Conn));
    conn->fd = fd;
    struct epoll_event event = {.events = EDGES, .data.ptr = conn};
    if (epoll_ctl(store->epoll, EPOLL_CTL_ADD, fd, &event) < 0) {
        int error = errno;
        free(conn);
        errno = error;
        return false;
    }
    conn->after = store->conns;
    if (store->conns != NULL)
        store->conns->before = conn;
    store->conns = conn;
    store->conn_count++;
    return true;
}

static void input_free(Conn *conn)
{
    free(conn->input);
    conn->input = NULL;
    conn->input_size = conn->input_room = 0;
}

/* Ends the connection. Nothing may be on its way to it in the store's segments. */
static void conn_close(Store *store, Conn *conn)
{
    table_forget(&store->table, conn);
    replies_drop(conn);
    input_free(conn);
    *(conn->before ? &conn->before->after : &store->conns) = conn->after;
    if (conn->after != NULL)
        conn->after->before = conn->before;
    store->conn_count--;
    /* Closing is not enough: where a forked process has the socket too, events would go on and name what is free. */
    epoll_ctl(store->epoll, EPOLL_CTL_DEL, conn->fd, NULL);
    close(conn->fd);
    free(conn);
}

void conn_rearm(Store *store, Conn *conn)
{
    struct epoll_event event = {.events = EDGES, .data.ptr = conn};
    epoll_ctl(store->epoll, EPOLL_CTL_MOD, conn->fd, &event);
}

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static bool out_of_means(int error)
{
    return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM || error == ENOSPC;
}

static void accept_all(Store *store)
{
    for (;;) {
        int fd = accept4(store->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0 && conn_open(store, fd))
            continue;
        int error = errno;
        if (fd >= 0)
            close(fd);
        if (out_of_means(error)) {
            epoll_ctl(store->epoll, EPOLL_CTL_DEL, store->listener, NULL);
            store->accept_again_at = now() + store->retry;
            store->starved(store, error);
            return;
        }
        if (error != EINTR && error != ECONNABORTED)
            return;
    }
}

static int watch(Store *store, int fd, void *as)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = as};
    return epoll_ctl(store->epoll, EPOLL_CTL_ADD, fd, &event);
}

/* Serves these bytes, and keeps what is left of them. False if the connection has gone then. */
static bool conn_serve(Store *store, Conn *conn, Text data)
{
    Refusal refusal = {.reason = REFUSE_NOTHING};
    size_t used = serve(store, conn, data, &refusal);
    if (refusal.reason != REFUSE_NOTHING) {
        store->refused(store, conn, &refusal);
        flush(store);
        table_forget(&store->table, conn);
        input_free(conn);
        conn->over = true;
        if (conn->full)
            return true; /* until its client has read what it had earned */
        conn_close(store, conn);
        return false;
    }
    size_t left = data.size - used;
    if (left == 0)
        input_free(conn); /* an idle connection must not hold on to the last large value */
    else if (data.bytes != conn->input) {
        conn->input_room = left < FIRST_INPUT ? FIRST_INPUT : left;
        conn->input = claim(NULL, conn->input_room);
        memcpy(conn->input, data.bytes + used, left);
        conn->input_size = left;
    } else if (used) {
        memmove(conn->input, conn->input + used, left);
        conn->input_size = left;
    }
    return true;
}

static bool serve_input(Store *store, Conn *conn)
{
    return conn_serve(store, conn, (Text){conn->input, conn->input_size});
}

/* One read into where it must go, and what it makes whole. Says how it went; the connection may have gone then. */
static enum { NOTHING_LEFT, MORE, GONE } conn_read(Store *store, Conn *conn)
{
    uint8_t *into = store->intake;
    size_t room = PIECE;
    if (conn->input_size) { /* what a request lacks is read to its place, as far as it does not outgrow what has come */
        size_t lacking = conn->want > conn->input_size ? conn->want - conn->input_size : 0;
        room = lacking < LEAST_READ ? LEAST_READ : lacking;
        if (room > conn->input_size + PIECE)
            room = conn->input_size + PIECE;
        if (conn->input_room - conn->input_size < room) {
            conn->input_room = conn->input_size + room;
            conn->input = claim(conn->input, conn->input_room);
        }
        into = conn->input + conn->input_size;
    }
    ssize_t size = recv(conn->fd, into, room, MSG_DONTWAIT);
    if (size < 0) {
        if (errno == EINTR)
            return MORE;
        if (errno == EAGAIN || errno == EWOULDBLOCK)
            return NOTHING_LEFT;
    }
    if (size <= 0) {
        flush(store);
        conn_close(store, conn);
        return GONE;
    }
    if (conn->input_size) {
        conn->input_size += (size_t)size;
        if (conn->input_size >= conn->want && !serve_input(store, conn))
            return GONE;
    } else if (!conn_serve(store, conn, (Text){into, (size_t)size}))
        return GONE;
    return (size_t)size == room ? MORE : NOTHING_LEFT;
}

/* There is room again. False if the connection has gone then. */
static bool conn_resume(Store *store, Conn *conn, uint32_t events)
{
    replies_resume(conn);
    if (conn->full && !(events & (EPOLLHUP | EPOLLERR)))
        return true;
    if (conn->full || conn->over) {
        flush(store);
        conn_close(store, conn);
        return false;
    }
    if (conn->input_size && !serve_input(store, conn))
        return false;
    conn_rearm(store, conn); /* what has come meanwhile was not read */
    return true;
}

static void conn_ready(Store *store, Conn *conn, uint32_t events)
{
    if (conn->full) {
        conn_resume(store, conn, events);
        return;
    }
    if (!(events & (EPOLLIN | GOING)))
        return;
    for (;;) {
        switch (conn_read(store, conn)) {
        case GONE: return;
        case MORE: conn_rearm(store, conn); return; /* others first */
        case NOTHING_LEFT: break;
        }
        if (conn->full || !(events & GOING))
            return;
        /* Where it is going, its end may lie behind what was just read. */
        char end;
        if (recv(conn->fd, &end, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
    }
}

int conn_adopt(Store *store, int fd, Text data)
{
    if (!conn_open(store, fd))
        return errno;
    if (data.size)
        conn_serve(store, store->conns, data);
    flush(store);
    return 0;
}

/* How many milliseconds there are until something must be done that no event tells of. */
static int pause_of(const Store *store)
{
    if (!store->accept_again_at)
        return -1;
    uint64_t at = now();
    return at < store->accept_again_at ? (int)((store->accept_again_at - at) / 1000000 + 1) : 0;
}

bool sweep(Store *store, bool may_wait)
{
    struct epoll_event events[MOST_EVENTS];
    int count = epoll_wait(store->epoll, events, MOST_EVENTS, may_wait ? pause_of(store) : 0);
    for (int i = 0; i < count; i++) {
        if (events[i].data.ptr == &store->listener)
            accept_all(store);
        else if (events[i].data.ptr == &store->wake) {
            uint64_t times;
            store->woken = read(store->wake, &times, sizeof times) > 0;
        } else
            conn_ready(store, events[i].data.ptr, events[i].events);
        if ((i + 1) % AT_ONCE == 0)
            flush(store);
    }
    flush(store);
    if (store->accept_again_at && now() >= store->accept_again_at) {
        store->accept_again_at = 0;
        watch(store, store->listener, &store->listener);
    }
    return count > 0;
}

int store_open(Store *store)
{
    store->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (store->epoll < 0)
        return -1;
    if (watch(store, store->wake, &store->wake) < 0 ||
        (store->listener >= 0 && watch(store, store->listener, &store->listener) < 0)) {
        int error = errno;
        close(store->epoll);
        errno = error;
        return -1;
    }
    table_open(&store->table);
    store->intake = claim(NULL, PIECE);
    return 0;
}

void store_close(Store *store)
{
    while (store->conns != NULL)
        conn_close(store, store->conns);
    close(store->epoll);
}

void store_free(Store *store)
{
    table_close(&store->table);
    free(store->out);
    free(store->segments);
    free(store->intake);
}
