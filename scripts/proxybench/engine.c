/* An engine that costs next to nothing, to measure proxies with.

   engine SOCKET [PORT]   listens on a Unix socket, and on 127.0.0.1:PORT too

   A request whose body has "stream":true is answered with server-sent events in chunks, its "max_tokens" or else CHUNKS
   (200) of them at once, or, where the request's path ends in "completions" and its body has "user":"paced", 50 a second until the client
   leaves, each with the time it was sent ("t", nanoseconds of CLOCK_MONOTONIC). Anything else gets one small JSON
   answer: of a chat, of an embedding or of a ranking. A thread per connection; one more thread sends all paced streams, evenly spread over the time. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MOST_STREAMS = 4096, PERIOD_NS = 20 * 1000 * 1000, REQUEST = 1 << 16 };

struct stream {
  int fd; /* 0: free */
  long long due;
  pthread_t reader;
};

static struct stream streams[MOST_STREAMS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int chunks = 200;

static long long now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int put(int fd, const char *data, size_t size) {
  while (size > 0) {
    ssize_t sent = send(fd, data, size, MSG_NOSIGNAL);
    if (sent <= 0) return -1;
    data += sent;
    size -= sent;
  }
  return 0;
}

static int event(char *out, size_t room, long long sent_at) {
  char data[400];
  int size = snprintf(data, sizeof data,
                      "data: {\"id\":\"chatcmpl-0123456789\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\","
                      "\"t\":%lld,\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},\"finish_reason\":null}]}\n\n",
                      sent_at);
  return snprintf(out, room, "%x\r\n%s\r\n", size, data);
}

static const char STREAM_HEAD[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
static const char FINISH[] =
    "data: {\"id\":\"chatcmpl-0123456789\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,"
    "\"delta\":{},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":8,\"total_tokens\":18}}\n\n";
static const char STREAM_END[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";

static int answer_at_once(int fd, const char *body) {
  char piece[512];
  const char *most = strstr(body, "\"max_tokens\":");
  int size = event(piece, sizeof piece, 0), count = most ? atoi(most + 13) : chunks;
  if (put(fd, STREAM_HEAD, sizeof STREAM_HEAD - 1)) return -1;
  for (int i = 0; i < count; i++)
    if (put(fd, piece, size)) return -1;
  size = snprintf(piece, sizeof piece, "%zx\r\n%s\r\n", sizeof FINISH - 1, FINISH);
  if (put(fd, piece, size)) return -1;
  return put(fd, STREAM_END, sizeof STREAM_END - 1);
}

static int answer_plain(int fd, const char *head) {
  static const char vector[] = "{\"object\":\"list\",\"model\":\"m\",\"data\":[{\"object\":\"embedding\",\"index\":0,\"embedding\":"
                               "[0.5,-0.25,0.125]}],\"usage\":{\"prompt_tokens\":10,\"total_tokens\":10}}";
  static const char ranking[] = "{\"model\":\"m\",\"object\":\"list\",\"results\":[{\"index\":0,\"relevance_score\":0.5},{\"index\":1,"
                                "\"relevance_score\":0.1},{\"index\":2,\"relevance_score\":0.9}]}";
  static const char chat[] =
      "{\"id\":\"chatcmpl-0123456789\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,"
      "\"message\":{\"role\":\"assistant\",\"content\":\"The capital of France is Paris.\"},\"finish_reason\":\"stop\"}],"
      "\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":8,\"total_tokens\":18}}";
  const char *body = !strncmp(head, "POST /v1/embeddings", 19) ? vector : !strncmp(head, "POST /v1/rerank", 15) ? ranking : chat;
  char answer[800];
  int size = snprintf(answer, sizeof answer, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                      strlen(body), body);
  return put(fd, answer, size);
}

static void answer_paced(int fd) {
  if (put(fd, STREAM_HEAD, sizeof STREAM_HEAD - 1)) return;
  pthread_mutex_lock(&lock);
  int mine = 0;
  while (mine < MOST_STREAMS && streams[mine].fd) mine++;
  if (mine < MOST_STREAMS) {
    streams[mine].due = now_ns() + (mine * 7919LL % 1000) * (PERIOD_NS / 1000);
    streams[mine].fd = fd;
  }
  pthread_mutex_unlock(&lock);
  char rest[256];
  while (recv(fd, rest, sizeof rest, 0) > 0) {
  }
  pthread_mutex_lock(&lock);
  if (mine < MOST_STREAMS) streams[mine].fd = 0;
  pthread_mutex_unlock(&lock);
}

static void *pace(void *unused) {
  (void)unused;
  char piece[512];
  for (;;) {
    struct timespec tick = {0, 500 * 1000};
    nanosleep(&tick, NULL);
    pthread_mutex_lock(&lock);
    long long now = now_ns();
    for (int i = 0; i < MOST_STREAMS; i++)
      if (streams[i].fd && streams[i].due <= now) {
        int size = event(piece, sizeof piece, now_ns());
        send(streams[i].fd, piece, size, MSG_NOSIGNAL | MSG_DONTWAIT);
        streams[i].due += PERIOD_NS;
      }
    pthread_mutex_unlock(&lock);
  }
  return NULL;
}

static void *serve(void *argument) {
  int fd = (int)(long)argument;
  char *request = malloc(REQUEST);
  size_t have = 0, dropped = 0; /* of a body that does not fit */
  for (;;) {
    ssize_t got = recv(fd, request + have, REQUEST - 1 - have, 0);
    if (got <= 0) break;
    have += got;
    request[have] = 0;
    char *end = strstr(request, "\r\n\r\n"), *length = strcasestr(request, "content-length:");
    size_t head = end ? end + 4 - request : 0;
    if (!end || have + dropped < head + (length && length < end ? atol(length + 15) : 0)) {
      if (end && have == REQUEST - 1) {
        dropped += have - head;
        have = head;
      }
      continue;
    }
    have = dropped = 0;
    if (!strstr(end, "\"stream\":true")) {
      if (answer_plain(fd, request)) break;
    } else if (strstr(end, "\"user\":\"paced\"")) {
      answer_paced(fd);
      break;
    } else if (answer_at_once(fd, end))
      break;
  }
  free(request);
  close(fd);
  return NULL;
}

static void *take(void *argument) {
  int listener = (int)(long)argument;
  pthread_attr_t small;
  pthread_attr_init(&small);
  pthread_attr_setstacksize(&small, 1 << 16);
  pthread_attr_setdetachstate(&small, PTHREAD_CREATE_DETACHED);
  for (;;) {
    int fd = accept(listener, NULL, NULL), one = 1;
    if (fd < 0) continue;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    pthread_t thread;
    if (pthread_create(&thread, &small, serve, (void *)(long)fd)) close(fd);
  }
  return NULL;
}

int main(int count, char **arguments) {
  if (count < 2) return fprintf(stderr, "usage: engine SOCKET [PORT]\n"), 2;
  signal(SIGPIPE, SIG_IGN);
  if (getenv("CHUNKS")) chunks = atoi(getenv("CHUNKS"));
  struct sockaddr_un path = {.sun_family = AF_UNIX};
  strncpy(path.sun_path, arguments[1], sizeof path.sun_path - 1);
  unlink(path.sun_path);
  int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  if (bind(listener, (void *)&path, sizeof path) || listen(listener, 4096)) return perror(arguments[1]), 1;
  pthread_t thread;
  pthread_create(&thread, NULL, pace, NULL);
  if (count > 2) {
    int tcp = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    setsockopt(tcp, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in loopback = {
        .sin_family = AF_INET, .sin_port = htons(atoi(arguments[2])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(tcp, (void *)&loopback, sizeof loopback) || listen(tcp, 4096)) return perror("tcp"), 1;
    pthread_create(&thread, NULL, take, (void *)(long)tcp);
  }
  take((void *)(long)listener);
}
