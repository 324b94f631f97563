/* Opens and closes connections.
 *
 * A connection is closed only at the end of a poll, after all replies were flushed: nothing refers to it then.
 */
#include "connections.h"

#include "listing.h"
#include "replies.h"
#include "waiting.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

bool conn_open(Store *store, int fd)
{
    Conn *conn = get_block(NULL, sizeof(Conn));
    if (conn == NULL) {
        errno = ENOMEM;
        return false;
    }
    *conn = (Conn){.fd = fd, .since = monotonic_now()};
    if (!conn_watch(store, conn)) {
        int error = errno;
        free(conn);
        errno = error;
        return false;
    }
    ring_add(&store->all, &conn->all);
    ring_add(&store->unvalidated, &conn->unvalidated);
    store->conn_count++;
    return true;
}

void conn_input_free(Conn *conn)
{
    free(conn->input);
    conn->input = NULL;
    conn->input_at = conn->input_size = conn->input_room = 0;
}

/* Takes no more requests, and cancels waits. */
static void stop_reading(Store *store, Conn *conn)
{
    conn->over = true;
    wait_cancel(store, conn);
    list_end(conn);
    conn_input_free(conn);
    ring_remove(&conn->busy);
    ring_remove(&conn->unvalidated);
}

/* Reports the reason, and closes the connection once its replies were sent. */
void conn_refuse(Store *store, Conn *conn, const Refusal *refusal)
{
    if (!conn->failed)
        store->refused(store, conn->fd, refusal);
    flush(store);
    stop_reading(store, conn);
    if (!conn->full || conn->failed)
        conn_doom(store, conn);
}

void conn_close(Store *store, Conn *conn)
{
    if (conn->failed)
        store->refused(store, conn->fd, &(Refusal){.reason = NO_MEMORY});
    stop_reading(store, conn);
    replies_drop(conn);
    ring_remove(&conn->doomed);
    ring_remove(&conn->all);
    store->conn_count--;
    /* Closing is not enough: if a forked process also has the socket, events would continue and refer to freed
     * memory. */
    epoll_ctl(store->epoll, EPOLL_CTL_DEL, conn->fd, NULL);
    close(conn->fd);
    free(conn);
}

void close_doomed(Store *store)
{
    Conn *conn;
    flush(store);
    while ((conn = FIRST(&store->doomed, Conn, doomed)) != NULL)
        conn_close(store, conn);
}
