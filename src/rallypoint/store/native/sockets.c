/* Connections, in one epoll set.
 *
 * Some connections are read and served, then all that they have earned is sent: few enough that their sockets are still
 * in the processor's caches, and so many that clients who were asleep find several replies when they wake. Laws:
 *
 * - a connection is closed only at the end of a sweep, after all replies were flushed: nothing names it then;
 * - whoever asks for more than a slice (`SLICE`) waits among the busy ones, who have their turns when all events were
 *   seen to, a few milliseconds in each sweep; nothing is read from him meanwhile.
 *
 * Events are told once, when something changes (EPOLLET), and for both directions; so whoever stops reading before
 * there was nothing left must ask to be told again (`conn_rearm`), and that the client has finished (EPOLLRDHUP) is
 * looked for as soon as it is told.
 */
#define _GNU_SOURCE /* accept4 */
#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static const uint32_t EDGES = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
static const uint32_t GOING = EPOLLRDHUP | EPOLLHUP | EPOLLERR;
static const uint64_t MILLISECOND = 1000000, BUSY_TIME = 2000000;

enum { FIRST_INPUT = 256, LEAST_READ = 4096 };

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static bool watch(Store *store, int fd, void *as)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = as};
    return epoll_ctl(store->epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

/* Whether a connection would get one of the descriptors that are for connections. */
static bool has_descriptor(const Store *store)
{
    int next = fcntl(store->wake, F_DUPFD_CLOEXEC, 0);
    if (next >= 0)
        close(next);
    return next >= 0 && next < store->descriptors;
}

static void listen_again(Store *store)
{
    bool can = has_descriptor(store) && watch(store, store->listener, &store->listener);
    store->accept_again_at = can ? 0 : now() + store->limits.retry;
    store->crowded = false;
}

/* Nobody is accepted for a while: there are no means, or with 0 as many connections as there may be. */
static void rest(Store *store, int error)
{
    int descriptors = store->starved(store, error);
    bool more = descriptors != store->descriptors;
    store->descriptors = descriptors;
    if (more)
        return; /* whoever waits is told of again */
    epoll_ctl(store->epoll, EPOLL_CTL_DEL, store->listener, NULL);
    store->crowded = error == 0;
    store->accept_again_at = now() + store->limits.retry;
}

/* Who may connect */

/* The address as IPv6 has it; false where it is no address of the internet. */
static bool address_of(const struct sockaddr_storage *from, uint8_t address[16])
{
    static const uint8_t mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    if (from->ss_family == AF_INET6)
        memcpy(address, &((const struct sockaddr_in6 *)from)->sin6_addr, 16);
    else if (from->ss_family == AF_INET) {
        memcpy(address, mapped, 12);
        memcpy(address + 12, &((const struct sockaddr_in *)from)->sin_addr, 4);
    } else
        return false;
    return true;
}

static bool is_in(const uint8_t address[16], const Network *network)
{
    size_t whole = network->bits / 8, rest = network->bits % 8;
    if (memcmp(address, network->address, whole) != 0)
        return false;
    return rest == 0 || (address[whole] ^ network->address[whole]) >> (8 - rest) == 0;
}

static int by_address(const void *a, const void *b)
{
    return memcmp(((const Network *)a)->address, ((const Network *)b)->address, 16);
}

static bool is_peer(const Store *store, int fd)
{
    struct sockaddr_storage from;
    socklen_t size = sizeof from;
    Network whole;
    if (!store->guarded)
        return true;
    if (getpeername(fd, (struct sockaddr *)&from, &size) < 0)
        return true; /* it has gone already, and reading will say so */
    if (!address_of(&from, whole.address))
        return true; /* a pair of sockets of this process */
    if (store->host_count && bsearch(&whole, store->peers, store->host_count, sizeof whole, by_address))
        return true;
    for (size_t i = store->host_count; i < store->peer_count; i++)
        if (is_in(whole.address, &store->peers[i]))
            return true;
    return false;
}

/* Connections come and go */

static bool conn_open(Store *store, int fd)
{
    Conn *conn = get_block(NULL, sizeof(Conn));
    if (conn == NULL) {
        errno = ENOMEM;
        return false;
    }
    *conn = (Conn){.fd = fd, .since = now()};
    struct epoll_event event = {.events = EDGES, .data.ptr = conn};
    if (epoll_ctl(store->epoll, EPOLL_CTL_ADD, fd, &event) < 0) {
        int error = errno;
        free(conn);
        errno = error;
        return false;
    }
    ring_add(&store->all, &conn->all);
    ring_add(&store->young, &conn->young);
    store->conn_count++;
    return true;
}

static void input_free(Conn *conn)
{
    free(conn->input);
    conn->input = NULL;
    conn->input_at = conn->input_size = conn->input_room = 0;
}

/* Takes no more requests, and waits for nothing. */
static void leave(Store *store, Conn *conn)
{
    conn->over = true;
    wait_give_up(store, conn);
    list_end(conn);
    input_free(conn);
    ring_remove(&conn->busy);
    ring_remove(&conn->young);
}

/* To be closed at the end of the sweep. */
static void doom(Store *store, Conn *conn)
{
    conn->over = true;
    if (conn->doomed.after == NULL)
        ring_add(&store->doomed, &conn->doomed);
}

void conn_fail(Store *store, Conn *conn)
{
    conn->failed = true;
    doom(store, conn);
}

/* Tells why, sends what it has earned, and ends it when that has gone. */
static void conn_refuse(Store *store, Conn *conn, const Refusal *refusal)
{
    if (!conn->failed)
        store->refused(store, conn->fd, refusal);
    flush(store);
    leave(store, conn);
    if (!conn->full || conn->failed)
        doom(store, conn);
}

static void conn_close(Store *store, Conn *conn)
{
    if (conn->failed)
        store->refused(store, conn->fd, &(Refusal){.reason = NO_MEMORY});
    leave(store, conn);
    replies_drop(conn);
    ring_remove(&conn->doomed);
    ring_remove(&conn->all);
    store->conn_count--;
    /* Closing is not enough: where a forked process has the socket too, events would go on and name what is free. */
    epoll_ctl(store->epoll, EPOLL_CTL_DEL, conn->fd, NULL);
    close(conn->fd);
    free(conn);
}

static void reap(Store *store)
{
    Conn *conn;
    flush(store);
    while ((conn = FIRST(&store->doomed, Conn, doomed)) != NULL)
        conn_close(store, conn);
}

void conn_rearm(Store *store, Conn *conn)
{
    struct epoll_event event = {.events = EDGES, .data.ptr = conn};
    epoll_ctl(store->epoll, EPOLL_CTL_MOD, conn->fd, &event);
}

static bool out_of_means(int error)
{
    return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM || error == ENOSPC;
}

static void accept_all(Store *store)
{
    for (int i = 0; i < MOST_ACCEPTED; i++) {
        if (store->limits.connections && store->conn_count >= store->limits.connections) {
            rest(store, 0);
            return;
        }
        int fd = accept4(store->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        int error = fd < 0 ? errno : 0;
        if (fd >= 0 && !is_peer(store, fd)) {
            store->refused(store, fd, &(Refusal){.reason = NOT_A_PEER});
            close(fd);
            continue;
        }
        if (fd >= 0 && conn_open(store, fd)) {
            if (fd < store->descriptors - 1)
                continue;
            error = EMFILE; /* this was the last one */
        } else if (fd >= 0) {
            error = errno;
            close(fd);
        }
        if (out_of_means(error)) {
            rest(store, error);
            return;
        }
        if (error != EINTR && error != ECONNABORTED)
            return;
    }
}

void store_admit(Store *store, Network *peers, size_t count, bool guarded)
{
    free(store->peers);
    store->peers = peers;
    store->peer_count = count;
    store->host_count = 0;
    while (store->host_count < count && peers[store->host_count].bits == 128)
        store->host_count++;
    if (store->host_count)
        qsort(peers, store->host_count, sizeof *peers, by_address);
    store->guarded = guarded;
    for (Node *node = store->all.after; node != &store->all; node = node->after) {
        Conn *conn = MEMBER(node, Conn, all);
        if (!conn->over && !is_peer(store, conn->fd))
            conn_refuse(store, conn, &(Refusal){.reason = NOT_A_PEER});
    }
    reap(store);
}

/* Bytes come */

static void no_memory(Store *store, Conn *conn)
{
    conn_refuse(store, conn, &(Refusal){.reason = NO_MEMORY});
}

/* Keeps what is left of these bytes, which are in the connection's own input or in the store's intake. */
static void conn_keep(Store *store, Conn *conn, Text left)
{
    if (left.size == 0)
        input_free(conn); /* an idle connection must not hold on to the last large value */
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

/* Serves these bytes, and keeps what is left of them. */
static void conn_serve(Store *store, Conn *conn, Text data)
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
    bool more = store->steps >= SLICE && (conn->input != NULL || conn->listing != NULL) && !conn->want;
    if (more && conn->busy.after == NULL)
        ring_add(&store->busy, &conn->busy);
}

static void serve_input(Store *store, Conn *conn)
{
    const uint8_t *bytes = conn->input != NULL ? conn->input + conn->input_at : store->intake;
    conn_serve(store, conn, (Text){bytes, conn->input_size - conn->input_at});
}

/* Room for so many bytes behind the input. */
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

/* One read into where it must go, and what it makes whole. Whether there may be more to read. */
static bool conn_read(Store *store, Conn *conn)
{
    uint8_t *into = store->intake;
    size_t room = PIECE, held = conn->input_size - conn->input_at;
    if (held) { /* what a request lacks is read to its place, as far as it does not outgrow what has come */
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
        doom(store, conn);
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

/* There is room again. */
static void conn_resume(Store *store, Conn *conn, uint32_t events)
{
    replies_resume(store, conn);
    if (conn->full) {
        if (events & (EPOLLHUP | EPOLLERR))
            doom(store, conn);
        return;
    }
    if (conn->over) {
        doom(store, conn);
        return;
    }
    if (conn->input != NULL || conn->listing != NULL)
        serve_input(store, conn);
    if (!conn->over)
        conn_rearm(store, conn); /* what has come meanwhile was not read */
}

static bool is_busy(const Conn *conn)
{
    return conn->busy.after != NULL;
}

static void conn_ready(Store *store, Conn *conn, uint32_t events)
{
    if (conn->full) {
        conn_resume(store, conn, events);
        return;
    }
    if (is_busy(conn)) {
        if (events & (EPOLLHUP | EPOLLERR))
            doom(store, conn);
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
        /* Where it is going, its end may lie behind what was just read. */
        char end;
        if (recv(conn->fd, &end, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
    }
}

/* Gives those a turn who have more to do than one slice, one after the other, for some time. */
static void serve_busy(Store *store)
{
    Conn *conn;
    for (uint64_t end = now() + BUSY_TIME; (conn = FIRST(&store->busy, Conn, busy)) != NULL;) {
        ring_remove(&conn->busy);
        serve_input(store, conn);
        if (!conn->over && !conn->full && !is_busy(conn))
            conn_rearm(store, conn); /* what has come meanwhile was not read */
        if (now() >= end)
            return;
    }
}

/* Time passes */

static void end_silent(Store *store, uint64_t at)
{
    Conn *conn;
    uint64_t patience = store->limits.greeting;
    while (patience && (conn = FIRST(&store->young, Conn, young)) != NULL && at - conn->since >= patience)
        conn_refuse(store, conn, &(Refusal){.reason = SILENT});
}

/* How many milliseconds there are until something must be done that no event tells of. */
static int pause_of(const Store *store, uint64_t at)
{
    uint64_t next = UINT64_MAX;
    const Conn *oldest = FIRST(&store->young, Conn, young);
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
    return FIRST(&store->busy, Conn, busy) != NULL || FIRST(&store->given_up, Waiting, node) != NULL;
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

bool sweep(Store *store, bool may_wait)
{
    struct epoll_event events[MOST_EVENTS];
    bool work = has_work(store);
    int count = epoll_wait(store->epoll, events, MOST_EVENTS, may_wait && !work ? pause_of(store, now()) : 0);
    for (int i = 0; i < count; i++) {
        on_event(store, &events[i]);
        if ((i + 1) % AT_ONCE == 0)
            flush(store);
    }
    if (work)
        serve_busy(store);
    reap(store);
    wait_clear(store, SLICE);
    uint64_t at = now();
    end_silent(store, at);
    reap(store);
    bool room = store->conn_count < store->limits.connections;
    if (store->accept_again_at && ((store->crowded && room) || at >= store->accept_again_at))
        listen_again(store);
    return count > 0 || work || has_work(store);
}

int conn_adopt(Store *store, int fd, Text data)
{
    if (!is_peer(store, fd)) {
        store->refused(store, fd, &(Refusal){.reason = NOT_A_PEER});
        return EPERM;
    }
    if (!conn_open(store, fd))
        return errno;
    if (data.size)
        conn_serve(store, MEMBER(store->all.before, Conn, all), data);
    reap(store);
    return 0;
}

int store_open(Store *store)
{
    ring_open(&store->all);
    ring_open(&store->young);
    ring_open(&store->busy);
    ring_open(&store->doomed);
    ring_open(&store->given_up);
    ring_open(&store->listings);
    store->out = get_block(NULL, OUT_ROOM);
    store->segments = get_block(NULL, OUT_SEGMENTS * sizeof(Segment));
    store->intake = get_block(NULL, PIECE);
    store->epoll = epoll_create1(EPOLL_CLOEXEC);
    bool enough = store->out != NULL && store->segments != NULL && store->intake != NULL;
    if (!enough)
        errno = ENOMEM;
    if (enough && store->epoll >= 0 && watch(store, store->wake, &store->wake) &&
        (store->listener < 0 || watch(store, store->listener, &store->listener))) {
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
