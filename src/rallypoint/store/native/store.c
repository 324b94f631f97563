/* Operations on connections that every file may use. */
#define _GNU_SOURCE /* EPOLLRDHUP, clock_gettime */
#include "store.h"

#include <sys/epoll.h>
#include <time.h>

static const uint32_t EDGES = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;

uint64_t monotonic_now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

bool store_watch(Store *store, int fd, void *as)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = as};
    return epoll_ctl(store->epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

static bool arm(Store *store, Conn *conn, int operation)
{
    struct epoll_event event = {.events = EDGES, .data.ptr = conn};
    return epoll_ctl(store->epoll, operation, conn->fd, &event) == 0;
}

bool conn_watch(Store *store, Conn *conn)
{
    return arm(store, conn, EPOLL_CTL_ADD);
}

void conn_rearm(Store *store, Conn *conn)
{
    arm(store, conn, EPOLL_CTL_MOD);
}

void conn_doom(Store *store, Conn *conn)
{
    conn->over = true;
    if (conn->doomed.after == NULL)
        ring_add(&store->doomed, &conn->doomed);
}

void conn_fail(Store *store, Conn *conn)
{
    conn->failed = true;
    conn_doom(store, conn);
}
