/* Changes how the ranks of a job find each other; find_others.py builds and loads it.
 *
 * Naps: a rank asks every half second, and every second, whether all are there, and every 3 s for another's address, so 2
 * ranks that start together need 1 to 5 s. Here they ask every 20 ms at first, and ever more rarely: most naps are no
 * longer than a tenth of the time since then, so nobody waits much longer than needed, or asks often for long.
 *
 * Addresses: on one machine all ranks of all jobs listen at 127.0.0.1, each at the next free port. If one dies before
 * another rank has connected to it, and a new job's rank gets its port, the other sends that one its numbers, which are
 * added up without a word. So each job has an address of its own there, made of the port of its scheduler. */
#define _GNU_SOURCE
#include "linker_table.h"

#include <arpa/inet.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>

static double start;
static int replaced; /* entries of the linker's tables */
static bool naps_are_short;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Sleep as long as asked, or as allowed if that is shorter. */
static int shorter_of(struct timespec time, double most, struct timespec *left)
{
    if ((double)time.tv_sec + 1e-9 * (double)time.tv_nsec > most) {
        time.tv_sec = (time_t)most;
        time.tv_nsec = (long)(1e9 * (most - floor(most)));
    }
    return nanosleep(&time, left);
}

/* As nanosleep(), with which MindSpore asks thousands of times. */
int nap(const struct timespec *asked, struct timespec *left)
{
    return shorter_of(*asked, fmax(0.02, (now() - start) / 10), left);
}

/* As sleep(), after which it gives up the 20th time, in some versions: so only some are shorter. */
unsigned long_nap(unsigned seconds)
{
    static int naps;
    struct timespec asked = {.tv_sec = (time_t)seconds};
    shorter_of(asked, ldexp(0.02, naps < 12 ? naps++ : 12), NULL);
    return 0;
}

/* May a rank listen there? Containers may have a loopback of one address only. */
static bool is_here(const char *address)
{
    struct sockaddr_in any_port = {.sin_family = AF_INET, .sin_addr.s_addr = inet_addr(address)};
    int probe = socket(AF_INET, SOCK_STREAM, 0);
    bool here = probe >= 0 && bind(probe, (struct sockaddr *)&any_port, sizeof any_port) == 0;
    close(probe);
    return here;
}

/* As setenv(), by which MindSpore tells itself at which address to listen: that from which the scheduler is reached. */
int set_address(const char *name, const char *value, int overwrite)
{
    char own[32];
    const char *told = getenv("MS_SCHED_PORT");
    unsigned port = told ? (unsigned)atoi(told) : 0;
    snprintf(own, sizeof own, "127.77.%u.%u", port >> 8 & 255, port & 255);
    bool change = strcmp(name, "MS_WORKER_IP") == 0 && strcmp(value, "127.0.0.1") == 0 && is_here(own);
    return setenv(name, change ? own : value, overwrite);
}

static void *choose(const char *name, void *before)
{
    void *own = NULL;
    if (strcmp(name, "setenv") == 0)
        own = (void *)set_address;
    else if (naps_are_short && strcmp(name, "nanosleep") == 0)
        own = (void *)nap;
    else if (naps_are_short && strcmp(name, "sleep") == 0)
        own = (void *)long_nap;
    if (!own || own == before)
        return NULL;
    replaced++;
    return own;
}

/* Before init(); returns how many calls are replaced. */
int take_over(bool short_naps)
{
    naps_are_short = short_naps;
    start = now();
    look_at_calls(choose);
    return replaced;
}
