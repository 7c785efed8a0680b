/* Moves a link's bytes through its socket, a bounded amount in each turn.
 *
 * One thread serves all links, so it must not wait for any. Every call returns at once
 * (MSG_DONTWAIT: the descriptor's own mode is its owner's), and a link has moved about one block in
 * each direction when the next one gets its turn.
 */
#include "engine_state.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void count(_Atomic uint64_t *counter, uint64_t amount) {
    atomic_store_explicit(counter,
                          atomic_load_explicit(counter, memory_order_relaxed) + amount,
                          memory_order_relaxed);
}

static void send_ahead(struct link *link, int bytes) {
    link->ahead_bytes = bytes;
    setsockopt(link->fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
}

/* The round trip of a byte and its acknowledgement without queueing; 0: unknown. */
static uint64_t way_ns(const struct link *link) {
    struct tcp_info info;
    socklen_t bytes = sizeof info;
    if (getsockopt(link->fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) ||
        bytes < offsetof(struct tcp_info, tcpi_min_rtt) + sizeof info.tcpi_min_rtt ||
        info.tcpi_min_rtt == UINT32_MAX)
        return 0;
    return info.tcpi_min_rtt * (uint64_t)1000;
}

/* As much as the link carries in AHEAD_NS and a round trip. A link that the buffer limits carries
 * about twice that (Linux doubles the requested size), so the buffer grows until something else is
 * the limit. It never shrinks: a socket that holds more than its limit does not retransmit. */
static void look_ahead(struct link *link) {
    const uint64_t bytes = atomic_load_explicit(&link->backlogged_bytes, memory_order_relaxed);
    const uint64_t ns = atomic_load_explicit(&link->backlogged_ns, memory_order_relaxed);
    const uint64_t took_ns = ns - link->looked_ns;
    if (took_ns < AHEAD_LOOK_NS) return;
    const double rate = (double)(bytes - link->looked_bytes) / (double)took_ns;
    const double carried = rate * (double)(AHEAD_NS + way_ns(link));
    link->looked_bytes = bytes;
    link->looked_ns = ns;
    const int wanted = carried < AHEAD_BYTES_MAX ? (int)carried : AHEAD_BYTES_MAX;
    if (wanted > link->ahead_bytes + link->ahead_bytes / 4) send_ahead(link, wanted);
}

/* Duplicates the descriptor: the caller closes its own. The options are for TCP and only improve
 * performance, so a socket that lacks them is accepted. */
const char *socket_take(struct link *link, int fd) {
    const int one = 1, unsent = UNSENT_BYTES_MAX;
    struct sockaddr_storage name;
    socklen_t name_bytes = sizeof name;
    int type = 0;
    socklen_t type_bytes = sizeof type;
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &type_bytes)) return "not a socket";
    errno = ENOTCONN;
    if (type != SOCK_STREAM) return "a link needs a stream socket";
    if (getpeername(fd, (struct sockaddr *)&name, &name_bytes)) return "the socket is not connected";
    link->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (link->fd < 0) return "the descriptor cannot be taken over";
    setsockopt(link->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(link->fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof unsent);
    send_ahead(link, AHEAD_BYTES_MIN);
    return NULL;
}

/* The end must not depend on copies of the descriptor in a forked child: the peer sees the
 * shutdown, and epoll would keep reporting a link that is gone. */
void socket_close(struct engine *engine, struct link *link) {
    if (link->fd < 0) return;
    epoll_ctl(engine->epoll_fd, EPOLL_CTL_DEL, link->fd, NULL);
    shutdown(link->fd, SHUT_RDWR);
    close(link->fd);
    link->fd = -1;
}

/* ---- Receiving -------------------------------------------------------------------------------- */
/* A block counts only when it is complete, so the thread is not woken for each of its packets. Only
 * bytes that must follow are waited for, because nothing may follow a block for a long time. Linux
 * signals at once if that many bytes are already there. */
static void wake_after(struct link *link) {
    uint32_t bytes = 1;
    if (link->in_block) bytes = link->in.length - link->in_block_bytes;
    if (bytes > WAKE_BYTES_MAX) bytes = WAKE_BYTES_MAX;
    if (bytes == link->wake_bytes) return;
    const int low = (int)bytes;
    link->wake_bytes = bytes;
    setsockopt(link->fd, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low);
}

/* Bytes that were read beyond their place. */
static bool spread(struct engine *engine, struct link *link, const char *bytes, size_t count) {
    while (count) {
        const struct iovec place = link_place(engine, link);
        const size_t part = count < place.iov_len ? count : place.iov_len;
        memcpy(place.iov_base, bytes, part);
        if (!link_took(engine, link, part)) return false;
        bytes += part;
        count -= part;
    }
    return true;
}

/* One call takes the rest of a block and the next header, or a header and the beginning of what
 * follows, which includes all of a small call's frame. Returns false if nothing is left: fewer
 * bytes than requested are all that there was (epoll(7)), but the end of the stream may follow them
 * with the same edge. */
static bool receive_once(struct engine *engine, struct link *link, size_t *bytes) {
    char ahead[AHEAD_READ_BYTES];
    struct iovec places[2] = {link_place(engine, link), {ahead, FRAME_BYTES}};
    const bool to_the_end =
        link->in_block && link->in_block_bytes + places[0].iov_len == link->in.length;
    if (!link->in_block) places[1].iov_len = AHEAD_READ_BYTES;
    const bool both = to_the_end || !link->in_block;
    struct msghdr message = {.msg_iov = places, .msg_iovlen = both ? 2 : 1};
    ssize_t got = recvmsg(link->fd, &message, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) return true;
    if (got < 0 && errno == EAGAIN) {
        link->readable = false;
        return false;
    }
    if (got <= 0) {
        char words[REASON_BYTES] = "the peer has closed the connection";
        if (got < 0) strerror_r(errno, words, sizeof words);
        link_lose(engine, link, link->reason[0] ? link->reason : words);
        return false;
    }
    *bytes += (size_t)got;
    count(&link->bytes_received, (uint64_t)got);
    const size_t first = (size_t)got < places[0].iov_len ? (size_t)got : places[0].iov_len;
    const size_t place = places[0].iov_len + (both ? places[1].iov_len : 0);
    if ((size_t)got < place && !link->ending) link->readable = false;
    if (!link_took(engine, link, first)) return false;
    return spread(engine, link, ahead, (size_t)got - first) && link->readable;
}

/* ---- Sending ---------------------------------------------------------------------------------- */
static void count_backlog(struct link *link, bool goes_on) {
    const uint64_t now = now_ns();
    if (link->backlogged_since_ns) count(&link->backlogged_ns, now - link->backlogged_since_ns);
    link->backlogged_since_ns = goes_on ? now : 0;
    look_ahead(link);
}

/* After a failure nothing is sent, but bytes that the peer sent before it left are still read. */
static void go_deaf(struct link *link) {
    strerror_r(errno, link->reason, sizeof link->reason);
    link->deaf = link->readable = true;
    link->writable = false;
}

static bool send_once(struct engine *engine, struct link *link, size_t *bytes) {
    if (!link->out_full && !link_next_frame(engine, link)) {
        if (link->backlogged_since_ns) count_backlog(link, false);
        return false;
    }
    const size_t sent = link->out_sent, length = link->out.length;
    const size_t block_sent = sent > FRAME_BYTES ? sent - FRAME_BYTES : 0;
    struct iovec parts[2] = {
        {(char *)&link->out + sent, FRAME_BYTES - sent},
        {(char *)link->out_block + block_sent, length - block_sent},
    };
    const bool header_sent = sent >= FRAME_BYTES;
    struct msghdr message = {
        .msg_iov = parts + header_sent,
        .msg_iovlen = (size_t)(length ? 2 : 1) - header_sent,
    };
    const ssize_t went = sendmsg(link->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (went < 0) {
        if (errno == EINTR) return true;
        if (errno == EAGAIN) {
            count_backlog(link, true);
            link->writable = false;
        } else {
            go_deaf(link);
        }
        return false;
    }
    *bytes += (size_t)went;
    count(&link->bytes_sent, (uint64_t)went);
    if (link->backlogged_since_ns) count(&link->backlogged_bytes, (uint64_t)went);
    link->out_sent += (uint32_t)went;
    if (link->out_sent == FRAME_BYTES + length) link_frame_sent(engine, link);
    return true; /* also after a part: only EAGAIN means that the kernel will signal */
}

/* Both directions, a bounded part of each. Stays active while there may be more. */
void socket_turn(struct engine *engine, struct link *link) {
    size_t bytes = 0;
    while (link->readable && bytes < engine->block_bytes_max)
        if (!receive_once(engine, link, &bytes)) break;
    if (link->lost) return;
    if (!link->readable) wake_after(link);
    bool more = true;
    bytes = 0;
    while (more && link->writable && bytes < engine->block_bytes_max)
        more = send_once(engine, link, &bytes);
    if (link->readable || (link->writable && more)) link_wake(engine, link);
}
