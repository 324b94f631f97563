/* The drives of `raw_load` and `startup_replay` in C: so cheap that the server is the bottleneck. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { STEPS = 4, MOST_EVENTS = 256, CHUNK = 4096 };
enum { CLOSED = -1, WRONG = -2, SILENT = -3 };

typedef struct {
    const char *message;
    int size, requests, reply_size;
    const char *reply; /* NULL where it differs from time to time */
} Step;

typedef struct {
    int step, got;
    double sent;
    char reply[CHUNK];
} Client;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* Whether the reply to the client's step is whole then; negative if it cannot be. */
static int receive(int fd, Client *client, const Step *step)
{
    ssize_t size = recv(fd, client->reply + client->got, CHUNK - (size_t)client->got, MSG_DONTWAIT);
    if (size < 0 && errno == EAGAIN)
        return 0;
    if (size <= 0)
        return CLOSED;
    client->got += (int)size;
    if (client->got < step->reply_size)
        return 0;
    if (client->got > step->reply_size || (step->reply && memcmp(client->reply, step->reply, (size_t)client->got)))
        return WRONG;
    client->got = 0;
    return 1;
}

static int run(int epoll, int count, const int *fds, const Step *steps, Client *clients, double begin, double seconds,
               long *requests, double *elapsed, float *latencies, long space, long *taken)
{
    double moment = begin;
    for (int i = 0; i < count; i++) {
        struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u32 = (unsigned)i};
        if (epoll_ctl(epoll, EPOLL_CTL_ADD, fds[i], &event) < 0)
            return CLOSED;
        clients[i].sent = now();
        if (send(fds[i], steps[i * STEPS].message, (size_t)steps[i * STEPS].size, MSG_NOSIGNAL) < 0)
            return CLOSED;
    }
    for (int outstanding = count; outstanding;) {
        struct epoll_event events[MOST_EVENTS];
        int ready = epoll_wait(epoll, events, MOST_EVENTS, 30000);
        if (ready == 0)
            return SILENT;
        for (int e = 0; e < ready; e++) {
            int i = (int)events[e].data.u32;
            Client *client = &clients[i];
            const Step *step = &steps[i * STEPS + client->step];
            int whole = receive(fds[i], client, step);
            if (whole < 0)
                return whole;
            if (!whole)
                continue;
            if (moment - begin >= seconds) { /* the last replies are taken and not counted */
                outstanding--;
                continue;
            }
            moment = now();
            *elapsed = moment - begin;
            *requests += step->requests;
            if (*taken < space)
                latencies[(*taken)++] = (float)(moment - client->sent);
            client->step = (client->step + 1) % STEPS;
            step = &steps[i * STEPS + client->step];
            client->sent = moment;
            if (send(fds[i], step->message, (size_t)step->size, MSG_NOSIGNAL) < 0)
                return CLOSED;
        }
    }
    return 0;
}

int drive(int count, const int *fds, const Step *steps, double seconds, long *requests, double *elapsed,
          float *latencies, long space, long *taken)
{
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    Client *clients = calloc((size_t)count, sizeof(Client));
    int result = epoll < 0 || clients == NULL ? CLOSED
                                             : run(epoll, count, fds, steps, clients, now(), seconds, requests, elapsed,
                                                   latencies, space, taken);
    free(clients);
    if (epoll >= 0)
        close(epoll);
    return result;
}

/* One connection's part of a recorded start-up: messages, and how many bytes come back before the next is sent. */
typedef struct {
    const char **messages;
    const int *sizes, *replies;
    int count;
} Dialogue;

enum { GET = 3 }; /* answered at once, whatever others do */

typedef struct {
    int next, missing, prompt;
    double sent;
} Speaker;

/* Sends until an answer is due: 1, or 0 if there is no more to say. */
static int speak(int fd, Speaker *speaker, const Dialogue *dialogue)
{
    while (speaker->next < dialogue->count) {
        int i = speaker->next++;
        speaker->prompt = dialogue->messages[i][0] == GET;
        speaker->missing = dialogue->replies[i];
        speaker->sent = now();
        if (send(fd, dialogue->messages[i], (size_t)dialogue->sizes[i], MSG_NOSIGNAL) != dialogue->sizes[i])
            return CLOSED;
        if (speaker->missing)
            return 1;
    }
    return 0;
}

static int talk(int epoll, int count, const int *fds, const Dialogue *dialogues, Speaker *speakers, float *latencies,
                long space, long *taken)
{
    static char chunk[65536];
    int left = 0;
    for (int i = 0; i < count; i++) {
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = (unsigned)i};
        int more = speak(fds[i], &speakers[i], &dialogues[i]);
        if (more < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, fds[i], &event) < 0)
            return CLOSED;
        left += more;
    }
    while (left) {
        struct epoll_event events[MOST_EVENTS];
        int ready = epoll_wait(epoll, events, MOST_EVENTS, 30000);
        if (ready == 0)
            return SILENT;
        for (int e = 0; e < ready; e++) {
            int i = (int)events[e].data.u32;
            Speaker *speaker = &speakers[i];
            ssize_t size = recv(fds[i], chunk, sizeof chunk, MSG_DONTWAIT);
            if (size <= 0)
                return CLOSED;
            speaker->missing -= (int)size;
            if (speaker->missing > 0)
                continue;
            if (speaker->missing < 0)
                return WRONG;
            if (speaker->prompt && *taken < space)
                latencies[(*taken)++] = (float)(now() - speaker->sent);
            int more = speak(fds[i], speaker, &dialogues[i]);
            if (more < 0)
                return more;
            left -= !more;
        }
    }
    return 0;
}

int replay(int count, const int *fds, const Dialogue *dialogues, float *latencies, long space, long *taken)
{
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    Speaker *speakers = calloc((size_t)count, sizeof(Speaker));
    int result = epoll < 0 || speakers == NULL ? CLOSED
                                              : talk(epoll, count, fds, dialogues, speakers, latencies, space, taken);
    free(speakers);
    if (epoll >= 0)
        close(epoll);
    return result;
}
