/* The store in C against arbitrary clients, for libFuzzer with the address and undefined-behaviour sanitizers.
 *
 * An input is a list of steps: a client sends bytes, reads some replies, disconnects, or memory is refused a while later.
 * After each input all clients go, and the store must be as it was: no connection, nobody waiting, no list, and counts
 * that agree with what is stored. What is not given back, the sanitizer finds.
 */
#define _GNU_SOURCE
#include "listing.h"
#include "polling.h"
#include "waiting.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

enum { CLIENTS = 4, MOST_TURNS = 100000 };

static uint64_t until_refused; /* blocks of memory, 0 for never */

bool store_memory_fails(void)
{
    return until_refused && --until_refused == 0;
}

static void on_refused(Store *store, int fd, const Refusal *refusal)
{
    /* Whoever reports it reads all of these bytes. */
    volatile uint8_t seen = 0;
    for (size_t i = 0; i < refusal->first.size; i++)
        seen ^= refusal->first.bytes[i];
    for (size_t i = 0; i < refusal->second.size; i++)
        seen ^= refusal->second.bytes[i];
    (void)store, (void)fd, (void)seen;
}

static int on_cannot_accept(Store *store, int error)
{
    (void)error;
    return store->descriptors;
}

static void must(bool is_so, const char *what)
{
    if (!is_so) {
        fprintf(stderr, "broken: %s\n", what);
        abort();
    }
}

static void work(Store *store)
{
    int turns = 0;
    while (poll_once(store, false))
        must(++turns < MOST_TURNS, "it comes to rest");
}

static int connect_one(Store *store)
{
    int pair[2], room = 4096;
    must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0, "a pair of sockets");
    setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    if (conn_add(store, pair[0], (Text){(const uint8_t *)"", 0}) != 0)
        close(pair[0]);
    return pair[1];
}

static void read_some(int fd, size_t most)
{
    uint8_t into[65536];
    if (recv(fd, into, most < sizeof into ? most : sizeof into, MSG_DONTWAIT) < 0)
        return;
}

static void check_counts(const Table *table)
{
    uint64_t values = 0, keys = 0, bytes = 0;
    for (size_t i = 0; i < SHARDS; i++) {
        const Shard *shard = &table->shards[i];
        size_t slots = 0;
        for (size_t j = 0; shard->buckets != NULL && j <= shard->mask; j++)
            for (const Slot *slot = shard->buckets[j]; slot != NULL; slot = slot->next) {
                slots++;
                must(ring_is_empty(&slot->waiters), "nobody waits");
                must(slot->value != NULL || slot->oldest != NULL, "a name is of something");
                keys++;
                bytes += slot->size + OVERHEAD + (slot->value ? slot->value->size : 0);
                values += slot->value != NULL;
                for (const Item *item = slot->oldest; item != NULL; item = item->next)
                    bytes += item->value->size + OVERHEAD;
            }
        must(slots == shard->slots, "the names of a part");
    }
    must(values == table->values && keys == table->keys && bytes == table->bytes, "the counts of the table");
}

static void end(Store *store, int *fds)
{
    until_refused = 0;
    for (int i = 0; i < CLIENTS; i++)
        close(fds[i]);
    work(store);
    /* Whoever reads /proc/PID/fd at this moment holds a socket open that was closed: its end comes a little later. */
    for (int i = 0; i < 500 && store->conn_count; i++) {
        struct pollfd ready = {.fd = store->epoll, .events = POLLIN};
        poll(&ready, 1, 10);
        work(store);
    }
    for (Node *node = store->all.after; node != &store->all; node = node->after) {
        const Conn *conn = MEMBER(node, Conn, all);
        char end;
        ssize_t left = recv(conn->fd, &end, 1, MSG_PEEK | MSG_DONTWAIT);
        fprintf(stderr, "left: over %d, full %d, busy %d, input %zu, reading it gives %zd\n", conn->over, conn->full,
                conn->busy.after != NULL, conn->input_size - conn->input_at, left);
    }
    must(store->conn_count == 0 && FIRST(&store->all, Conn, all) == NULL, "all connections are closed");
    must(ring_is_empty(&store->cancelled), "nobody waits any more");
    must(ring_is_empty(&store->waking) && ring_is_empty(&store->held), "everybody was woken");
    must(FIRST(&store->listings, Listing, node) == NULL, "no list is being made");
    check_counts(&store->table);
    store_close(store);
    store_free(store);
    close(store->wake);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t greeting[5] = {0, 0xce, 0xf7, 0x85, 0x3c};
    Store *store = calloc(1, sizeof *store);
    int fds[CLIENTS];
    must(store != NULL, "memory");
    *store = (Store){.listener = -1, .wake = eventfd(0, EFD_NONBLOCK), .descriptors = 1 << 20};
    store->refused = on_refused;
    store->cannot_accept = on_cannot_accept;
    store->limits = (Limits){.request = 100000, .value = 100000, .keys = 1000, .bytes = 1000000};
    until_refused = 0;
    must(store_open(store) == 0, "a store");
    for (int i = 0; i < CLIENTS; i++) {
        fds[i] = connect_one(store);
        if (i) /* the first one has to greet by itself */
            must(send(fds[i], greeting, sizeof greeting, MSG_NOSIGNAL) == sizeof greeting, "a greeting");
    }
    while (size > 1) {
        int *fd = &fds[data[0] % CLIENTS];
        unsigned what = data[0] / CLIENTS % 16;
        size_t much = data[1];
        data += 2, size -= 2;
        if (what < 10) {
            much = much < size ? much : size;
            if (send(*fd, data, much, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
                much = 0;
            data += much, size -= much;
        } else if (what < 13)
            read_some(*fd, (much + 1) * 256);
        else if (what == 13)
            until_refused = much;
        else if (what == 14) {
            close(*fd);
            *fd = connect_one(store);
            if (send(*fd, greeting, sizeof greeting, MSG_NOSIGNAL) < 0)
                continue;
        } else
            shutdown(*fd, SHUT_WR);
        if (much % 4)
            work(store);
        else
            poll_once(store, false);
    }
    end(store, fds);
    free(store);
    return 0;
}
