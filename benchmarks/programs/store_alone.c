/* The store in C with as many clients as are asked for, and no kernel: `store_alone CLIENTS`.
 *
 * It is built from the store's sources with what they call of the kernel replaced by what is here (`store_herd`): a
 * descriptor is a number, whoever has a request to send is reported as ready, and what is sent is taken at once. So it
 * shows what the store's own part costs, and whether it grows, where no process may have so many connections.
 *
 * For each phase a line: nanoseconds of processor time for each client, and of the longest turn.
 */
#define _GNU_SOURCE /* the clock of a thread */
#include "polling.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>

enum { FIRST = 1000 }; /* the descriptor of the first client: real ones are below */

static void **conns; /* what the store has each descriptor reported as */
static bool *asks;
static const char *request;
static size_t request_size;
static int next, end; /* clients that are still to be reported as ready */

int no_epoll_ctl(int epoll, int operation, int fd, struct epoll_event *event)
{
    (void)epoll, (void)operation;
    if (fd >= FIRST && event != NULL)
        conns[fd - FIRST] = event->data.ptr;
    return 0;
}

int no_epoll_wait(int epoll, struct epoll_event *events, int most, int timeout)
{
    int count = 0;
    (void)epoll, (void)timeout;
    while (count < most && next < end)
        events[count++] = (struct epoll_event){.events = EPOLLIN, .data.ptr = conns[next++]};
    return count;
}

ssize_t no_recv(int fd, void *into, size_t room, int flags)
{
    (void)room, (void)flags;
    if (!asks[fd - FIRST]) {
        errno = EAGAIN;
        return -1;
    }
    asks[fd - FIRST] = false;
    memcpy(into, request, request_size);
    return (ssize_t)request_size;
}

ssize_t no_send(int fd, const void *bytes, size_t size, int flags)
{
    (void)fd, (void)bytes, (void)flags;
    return (ssize_t)size;
}

int no_close(int fd)
{
    (void)fd;
    return 0;
}

static void on_refused(Store *store, int fd, const Refusal *refusal)
{
    (void)store, (void)fd;
    fprintf(stderr, "a client was refused: %d\n", refusal->reason);
    abort();
}

static double used(void)
{
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

/* These clients send this in one moment. */
static void phase(Store *store, const char *bytes, size_t size, int from, int to, int clients)
{
    double began = used(), longest = 0;
    bool any;
    request = bytes, request_size = size, next = from, end = to;
    memset(asks + from, true, (size_t)(to - from));
    do {
        double turn = used();
        any = poll_once(store, false);
        turn = used() - turn;
        longest = turn > longest ? turn : longest;
    } while (any);
    printf("%.0f %.0f\n", (used() - began) / clients, longest);
}

#define KEY(letter) "\1\0\0\0\0\0\0\0" letter
#define ADD "\4" KEY("c") "\1\0\0\0\0\0\0\0"
#define PHASE(bytes, from, to) phase(store, bytes, sizeof(bytes) - 1, from, to, clients)

int main(int count, char **arguments)
{
    int clients = count > 1 ? atoi(arguments[1]) : 1;
    Store *store = calloc(1, sizeof *store);
    conns = calloc((size_t)clients + 1, sizeof *conns);
    asks = calloc((size_t)clients + 1, sizeof *asks);
    if (store == NULL || conns == NULL || asks == NULL)
        return 1;
    *store = (Store){.listener = -1, .wake = eventfd(0, EFD_NONBLOCK), .descriptors = INT32_MAX, .refused = on_refused};
    store->limits = (Limits){.request = 1 << 20, .value = 1 << 20, .keys = 1 << 20, .bytes = 1 << 30};
    if (store_open(store) < 0)
        return 1;
    for (int i = 0; i <= clients; i++)
        if (conn_add(store, FIRST + i, (Text){(const uint8_t *)"", 0}) != 0)
            return 1;
    PHASE("\0\xce\xf7\x85\x3c\x0d\1\0\0\0", 0, clients + 1);
    PHASE(ADD, 0, clients);
    PHASE(ADD "\6\1\0\0\0\0\0\0\0" KEY("g"), 0, clients);
    PHASE("\1" KEY("g") KEY("o"), clients, clients + 1);
    store_close(store);
    store_free(store);
    return 0;
}
