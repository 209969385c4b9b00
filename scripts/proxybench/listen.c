/* Opens paced streams and measures how late their chunks come.

   listen PORT STREAMS SECONDS MODEL [KEY]   asks 127.0.0.1:PORT, with an API key if one is given; prints "chunks
                                             p50_us p99_us max_us open" after SECONDS */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { BUCKETS = 1 << 20 }; /* microseconds */
static unsigned counts[BUCKETS];

static long long now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int ask(int port, const char *model, const char *key) {
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(fd, (void *)&to, sizeof to)) return perror("connect"), -1;
  char body[400], request[800];
  int size = snprintf(body, sizeof body, "{\"model\":\"%s\",\"messages\":[],\"user\":\"paced\",\"stream\":true}", model);
  int whole = snprintf(request, sizeof request,
                       "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n"
                       "%s%s%sContent-Length: %d\r\n\r\n%s",
                       port, *key ? "X-API-Key: " : "", key, *key ? "\r\n" : "", size, body);
  if (send(fd, request, whole, 0) != whole) return -1;
  fcntl(fd, F_SETFL, O_NONBLOCK);
  return fd;
}

static long note(const char *data, size_t size, long long warm) {
  long found = 0;
  const char *end = data + size, *at = data;
  while ((at = memmem(at, end - at, "\"t\":", 4))) {
    long long sent = atoll(at += 4), late = (now_ns() - sent) / 1000;
    if (sent < warm) continue;
    counts[late < 0 ? 0 : late >= BUCKETS ? BUCKETS - 1 : late]++;
    found++;
  }
  return found;
}

static int percentile(long total, double share) {
  long seen = 0;
  for (int i = 0; i < BUCKETS; i++)
    if ((seen += counts[i]) >= total * share) return i;
  return BUCKETS;
}

int main(int count, char **arguments) {
  if (count < 5) return fprintf(stderr, "usage: listen PORT STREAMS SECONDS MODEL [KEY]\n"), 2;
  int streams = atoi(arguments[2]), poll = epoll_create1(0), open = 0;
  for (int i = 0; i < streams; i++) {
    int fd = ask(atoi(arguments[1]), arguments[4], count > 5 ? arguments[5] : "");
    struct epoll_event wanted = {.events = EPOLLIN, .data.fd = fd};
    if (fd >= 0 && !epoll_ctl(poll, EPOLL_CTL_ADD, fd, &wanted)) open++;
  }
  long long warm = now_ns() + 1000000000LL, until = warm + (long long)(atof(arguments[3]) * 1e9);
  printf("warm\n");
  fflush(stdout);
  long total = 0;
  static char data[1 << 16];
  while (now_ns() < until) {
    struct epoll_event ready[256];
    int some = epoll_wait(poll, ready, 256, 100);
    for (int i = 0; i < some; i++) {
      ssize_t got = recv(ready[i].data.fd, data, sizeof data - 1, 0);
      if (got <= 0) {
        close(ready[i].data.fd);
        open--;
        continue;
      }
      data[got] = 0;
      if (!strncmp(data, "HTTP/1.1 ", 9) && strncmp(data + 9, "200", 3)) return fprintf(stderr, "%.300s\n", data), 1;
      total += note(data, got, warm);
    }
  }
  printf("%ld %d %d %d %d\n", total, percentile(total, 0.5), percentile(total, 0.99), percentile(total, 1.0), open);
}
