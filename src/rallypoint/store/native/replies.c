/* Outgoing replies: in order of creation, adjacent ones to one connection in one write. */
#include "replies.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

enum {
    MOST_AT_ONCE = 64,
    JOINED = 16 * 1024, /* a longer value is not copied, but sent by reference */
};

/* The next segment. Never fails: if all are in use, they are flushed. */
static Segment *segment(Store *store)
{
    if (store->segment_count == OUT_SEGMENTS)
        flush(store);
    return &store->segments[store->segment_count++];
}

static void owe(Store *store, const Conn *conn, size_t size)
{
    store->steps += size / STEP;
    if (conn == store->serving)
        store->owed += size;
}

void reply_bytes(Store *store, Conn *conn, const void *bytes, size_t size)
{
    if (store->out_size + size > OUT_ROOM)
        flush(store);
    Segment *last = store->segment_count ? &store->segments[store->segment_count - 1] : NULL;
    if (last != NULL && last->conn == conn && last->blob == NULL)
        last->size += size;
    else {
        Segment *made = segment(store); /* which may flush, and empty `out` */
        *made = (Segment){.conn = conn, .at = store->out_size, .size = size};
    }
    if (size)
        memcpy(store->out + store->out_size, bytes, size);
    store->out_size += size;
    owe(store, conn, size);
}

void reply_byte(Store *store, Conn *conn, uint8_t byte)
{
    reply_bytes(store, conn, &byte, 1);
}

void reply_number(Store *store, Conn *conn, uint64_t number)
{
    reply_bytes(store, conn, &number, 8);
}

void reply_blob(Store *store, Conn *conn, Blob *value)
{
    if (value->size <= JOINED) {
        if (value->size)
            reply_bytes(store, conn, value->bytes, value->size);
        return;
    }
    *segment(store) = (Segment){.conn = conn, .blob = blob_hold(value), .size = value->size};
    owe(store, conn, value->size);
}

void reply_value(Store *store, Conn *conn, Blob *value)
{
    reply_number(store, conn, value ? value->size : 0);
    if (value != NULL)
        reply_blob(store, conn, value);
}

/* Puts the rest of a segment after the waiting output. */
static void keep(Store *store, const Segment *part)
{
    Conn *conn = part->conn;
    Piece *piece = get_block(NULL, sizeof(Piece));
    Blob *blob = part->blob;
    if (blob != NULL)
        blob_hold(blob);
    else
        blob = blob_new((Text){store->out + part->at, part->size});
    if (piece == NULL || blob == NULL) {
        free(piece);
        blob_drop(blob);
        conn_fail(store, conn);
        return;
    }
    size_t at = part->blob != NULL ? part->at : 0;
    *piece = (Piece){.blob = blob, .at = at, .end = at + part->size};
    *(conn->backlog_end ? &conn->backlog_end->next : &conn->backlog) = piece;
    conn->backlog_end = piece;
}

/* The number of bytes that the kernel took; 0 if it has no room, -1 if the connection is ending. */
static ssize_t give(Conn *conn, struct iovec *parts, size_t count)
{
    ssize_t sent;
    do {
        if (count == 1)
            sent = send(conn->fd, parts->iov_base, parts->iov_len, MSG_NOSIGNAL | MSG_DONTWAIT);
        else {
            struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
            sent = sendmsg(conn->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        }
    } while (sent < 0 && errno == EINTR);
    return sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) ? 0 : sent;
}

/* Sends segments of one connection, and keeps the rest. */
static void flush_to(Store *store, Conn *conn, Segment *first, size_t count)
{
    size_t sent = 0;
    if (!conn->full) {
        struct iovec parts[MOST_AT_ONCE];
        size_t wanted = 0;
        for (size_t i = 0; i < count; i++) {
            parts[i].iov_base = (first[i].blob ? first[i].blob->bytes : store->out) + first[i].at;
            parts[i].iov_len = first[i].size;
            wanted += first[i].size;
        }
        ssize_t taken = give(conn, parts, count);
        if (taken < 0) { /* reading will find its remaining input */
            conn->reading_stopped = true;
            conn_rearm(store, conn);
            return;
        }
        sent = (size_t)taken;
        if (sent == wanted)
            return;
        conn->full = true;
    }
    for (size_t i = 0; i < count; i++) {
        size_t gone = sent < first[i].size ? sent : first[i].size;
        sent -= gone;
        first[i].at += gone;
        first[i].size -= gone;
        if (first[i].size)
            keep(store, &first[i]);
    }
}

void flush(Store *store)
{
    for (size_t i = 0, end; i < store->segment_count; i = end) {
        Conn *conn = store->segments[i].conn;
        for (end = i + 1; end < store->segment_count && end < i + MOST_AT_ONCE; end++)
            if (store->segments[end].conn != conn)
                break;
        if (!conn->failed && !conn->reading_stopped)
            flush_to(store, conn, &store->segments[i], end - i);
    }
    for (size_t i = 0; i < store->segment_count; i++)
        blob_drop(store->segments[i].blob);
    store->segment_count = store->out_size = store->owed = 0;
}

void replies_resume(Store *store, Conn *conn)
{
    conn->full = false;
    while (conn->backlog != NULL) {
        Piece *piece = conn->backlog;
        struct iovec rest = {piece->blob->bytes + piece->at, piece->end - piece->at};
        ssize_t sent = give(conn, &rest, 1);
        if (sent < 0) {
            conn->reading_stopped = true;
            replies_drop(conn);
            conn_rearm(store, conn);
            return;
        }
        piece->at += (size_t)sent;
        if (piece->at < piece->end) {
            conn->full = true;
            return;
        }
        conn->backlog = piece->next;
        if (conn->backlog == NULL)
            conn->backlog_end = NULL;
        blob_drop(piece->blob);
        free(piece);
    }
}

void replies_drop(Conn *conn)
{
    while (conn->backlog != NULL) {
        Piece *piece = conn->backlog;
        conn->backlog = piece->next;
        blob_drop(piece->blob);
        free(piece);
    }
    conn->backlog_end = NULL;
}
