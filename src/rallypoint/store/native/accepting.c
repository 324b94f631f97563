/* Admission: who may connect, and how many. */
#define _GNU_SOURCE /* accept4 */
#include "accepting.h"

#include "connections.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MOST_ACCEPTED = 256 }; /* connections accepted in one poll */

/* Whether a new connection would get a descriptor that is reserved for connections. */
static bool has_descriptor(const Store *store)
{
    int next = fcntl(store->wake, F_DUPFD_CLOEXEC, 0);
    if (next >= 0)
        close(next);
    return next >= 0 && next < store->descriptors;
}

void accept_again(Store *store)
{
    bool can = has_descriptor(store) && store_watch(store, store->listener, &store->listener);
    store->accept_again_at = can ? 0 : monotonic_now() + store->limits.retry;
    store->at_connection_limit = false;
}

/* Pauses accepting: resources are lacking or, with error 0, there are enough connections. */
static void pause_accepting(Store *store, int error)
{
    int descriptors = store->cannot_accept(store, error);
    bool more = descriptors != store->descriptors;
    store->descriptors = descriptors;
    if (more)
        return; /* waiting clients are reported again */
    epoll_ctl(store->epoll, EPOLL_CTL_DEL, store->listener, NULL);
    store->at_connection_limit = error == 0;
    store->accept_again_at = monotonic_now() + store->limits.retry;
}

/* The address in the form of IPv6; false if it is no internet address. */
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

bool is_peer(const Store *store, int fd)
{
    struct sockaddr_storage from;
    socklen_t size = sizeof from;
    Network whole;
    if (!store->guarded)
        return true;
    if (getpeername(fd, (struct sockaddr *)&from, &size) < 0)
        return true; /* it has left already; reading will show it */
    if (!address_of(&from, whole.address))
        return true; /* a socket pair in this process */
    if (store->host_count && bsearch(&whole, store->peers, store->host_count, sizeof whole, by_address))
        return true;
    for (size_t i = store->host_count; i < store->peer_count; i++)
        if (is_in(whole.address, &store->peers[i]))
            return true;
    return false;
}

Reason why_refused(Store *store, int fd)
{
    if (!is_peer(store, fd))
        return NOT_A_PEER;
    return store->is_other_user && store->is_other_user(store, fd) ? OTHER_USER : REFUSE_NOTHING;
}

static bool out_of_means(int error)
{
    return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM || error == ENOSPC;
}

void accept_all(Store *store)
{
    for (int i = 0; i < MOST_ACCEPTED; i++) {
        if (store->limits.connections && store->conn_count >= store->limits.connections) {
            pause_accepting(store, 0);
            return;
        }
        int fd = accept4(store->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        int error = fd < 0 ? errno : 0;
        Reason refused = fd < 0 ? REFUSE_NOTHING : why_refused(store, fd);
        if (refused) {
            store->refused(store, fd, &(Refusal){.reason = refused});
            close(fd);
            continue;
        }
        if (fd >= 0 && conn_open(store, fd)) {
            if (fd < store->descriptors - 1)
                continue;
            error = EMFILE; /* this was the last descriptor */
        } else if (fd >= 0) {
            error = errno;
            close(fd);
        }
        if (out_of_means(error)) {
            pause_accepting(store, error);
            return;
        }
        if (error != EINTR && error != ECONNABORTED)
            return;
    }
}

void store_set_peers(Store *store, Network *peers, size_t count, bool guarded)
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
    close_doomed(store);
}
