/* The clients of `herd` and the one of `bystander` in C: so cheap that one core of them keeps a server busy. */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdbool.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#ifndef IP_BIND_ADDRESS_NO_PORT
#define IP_BIND_ADDRESS_NO_PORT 24
#endif

enum { AN_ADDRESS = 1024 }; /* clients that come from one: looking for one of many ports takes the system long */
enum { MOST_EVENTS = 256, PATIENCE = 120000, MILLISECOND = 1000000 };
enum { CLOSED = -1, SILENT = -3, NO_SOCKET = -4 };

static double now(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* Has the client of this number connect, from 127.1.0.0 or an address that follows. */
static int begin(int number, int port)
{
    int on = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct sockaddr_in from = {.sin_family = AF_INET}, to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    from.sin_addr.s_addr = htonl(0x7f010000u + (uint32_t)number / AN_ADDRESS);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (fd < 0 || bind(fd, (struct sockaddr *)&from, sizeof from) < 0)
        return -1;
    return connect(fd, (struct sockaddr *)&to, sizeof to) < 0 && errno != EINPROGRESS ? -1 : fd;
}

static bool say(int fd, const char *message, int size)
{
    return send(fd, message, (size_t)size, MSG_NOSIGNAL) == size;
}

/* Takes from each of them as many bytes as are missing, some of which may be there from before; `left` clients lack some. */
static int hear(int epoll, const int *fds, int *missing, int left, double *ended)
{
    char chunk[4096];
    while (left) {
        struct epoll_event events[MOST_EVENTS];
        int ready = epoll_wait(epoll, events, MOST_EVENTS, PATIENCE);
        if (ready <= 0)
            return SILENT;
        for (int e = 0; e < ready; e++) {
            int i = (int)events[e].data.u32;
            ssize_t size = recv(fds[i], chunk, sizeof chunk, MSG_DONTWAIT);
            if (size < 0 && errno == EAGAIN)
                continue;
            if (size <= 0)
                return CLOSED;
            left -= missing[i] > 0 && missing[i] <= size;
            missing[i] -= (int)size;
        }
    }
    *ended = now(CLOCK_MONOTONIC);
    return 0;
}

/* Connects all at once; each says this as soon as it can, and waits for a reply of so many bytes. */
int assemble(int epoll, int first, int count, int port, const char *message, int size, int reply, int *fds, int *missing,
             double *ended)
{
    for (int i = 0; i < count; i++) {
        struct epoll_event event = {.events = EPOLLOUT | EPOLLONESHOT, .data.u32 = (unsigned)i};
        fds[i] = begin(first + i, port);
        missing[i] = reply;
        if (fds[i] < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, fds[i], &event) < 0)
            return NO_SOCKET;
    }
    for (int left = count; left;) {
        struct epoll_event events[MOST_EVENTS];
        int ready = epoll_wait(epoll, events, MOST_EVENTS, PATIENCE);
        if (ready <= 0)
            return SILENT;
        for (int e = 0; e < ready; e++, left--)
            if (events[e].events & (EPOLLERR | EPOLLHUP) || !say(fds[events[e].data.u32], message, size))
                return CLOSED;
    }
    for (int i = 0; i < count; i++) { /* only now, lest replies be taken for connects; what has come is told as well */
        struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u32 = (unsigned)i};
        epoll_ctl(epoll, EPOLL_CTL_MOD, fds[i], &event);
    }
    return hear(epoll, fds, missing, count, ended);
}

/* Each says this, if it is anything, and waits for a reply of so many bytes. */
int converse(int epoll, int count, const char *message, int size, int reply, const int *fds, int *missing, double *ended)
{
    int left = 0;
    for (int i = 0; i < count; i++) {
        missing[i] += reply;
        left += missing[i] > 0;
        if (size && !say(fds[i], message, size))
            return CLOSED;
    }
    return hear(epoll, fds, missing, left, ended);
}

/* One round trip every millisecond until there is something to read at `stop`: how long each took, and how much processor
 * time the server used meanwhile, which nothing else on this machine makes longer. */
long look_on(int fd, int stop, int server, const char *message, int size, int reply, float *waits, float *servers,
             long space)
{
    char chunk[4096];
    struct timespec next;
    struct pollfd told = {.fd = stop, .events = POLLIN};
    long count = 0;
    clock_gettime(CLOCK_MONOTONIC, &next);
    for (; poll(&told, 1, 0) == 0 && count < space; count++) {
        double began = now(CLOCK_MONOTONIC), used = now(server);
        if (!say(fd, message, size))
            return CLOSED;
        for (int missing = reply; missing > 0;) {
            ssize_t got = recv(fd, chunk, sizeof chunk, 0);
            if (got <= 0)
                return CLOSED;
            missing -= (int)got;
        }
        servers[count] = (float)(now(server) - used);
        waits[count] = (float)(now(CLOCK_MONOTONIC) - began);
        do {
            next.tv_nsec += MILLISECOND;
            if (next.tv_nsec >= 1000 * MILLISECOND)
                next = (struct timespec){.tv_sec = next.tv_sec + 1, .tv_nsec = next.tv_nsec - 1000 * MILLISECOND};
        } while ((double)next.tv_sec + (double)next.tv_nsec * 1e-9 <= now(CLOCK_MONOTONIC));
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &next, NULL);
    }
    return count;
}
