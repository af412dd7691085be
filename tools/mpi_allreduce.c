/* MindSpore's all-reduce on CPU by MPI, where it is the sum of float32 over all ranks; mpi_allreduce.py builds and
 * loads it.
 *
 * MindSpore's own (MCCL) is one function for each type of number: CollectiveOpsImpl::AllReduce<T>. The library of its
 * CPU kernels calls it through the table in which the dynamic linker has put its address. take_over() puts
 * all_reduce() there instead, for T = float only. It is told operation and group, and hands all else to MCCL.
 * What must hold for a right sum is looked at in each call, or tried at the first: see all_reduce().
 */
#define _GNU_SOURCE
#include "linker_table.h"

#include <dlfcn.h>
#include <math.h>
#include <mpi.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SYMBOL                                                                                                \
    "_ZN9mindspore2fl6server17CollectiveOpsImpl9AllReduceIfEEbPKvPvmiRKSt10shared_ptrINS_2ps4core12AbstractNodeEE" \
    "RKNS1_22CommunicationGroupInfoE"
#define PIECE ((size_t)1 << 28) /* numbers a message: MPI counts with an int */

enum { SUM = 4 }; /* mindspore::fl::server::CollectiveOpReduceType */

struct group { /* how mindspore::fl::server::CommunicationGroupInfo begins */
    uint32_t size, my_rank;
    const uint32_t *ranks, *end; /* a std::vector */
};

typedef bool (*all_reduce_t)(void *self, const void *in, void *out, size_t count, int operation, const void *node,
                             const struct group *group);

static all_reduce_t mccl;
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
static MPI_Comm world;
static int size, rank, calls, slots;
static bool tried, trusted;
static double patience;
static pid_t owner; /* the rank, not a process that it has forked */

/* Wait until all ranks are here, each with so many numbers; false, with a sentence, if they do not come in time or
 * have other ones (with 0, for the end, in silence). A thread that spins in MPI_Allreduce would take a core from ranks
 * that still compute or compile, for as long as that takes; so sleep after some microseconds. */
static bool all_are_here(size_t count, double seconds)
{
    MPI_Request arrival;
    int here = 0;
    double start = MPI_Wtime(), waited = 0;
    static long long mine[2], least[2]; /* MPI may come back to them after a return that did not wait longer */
    mine[0] = (long long)count, mine[1] = -(long long)count;
    MPI_Iallreduce(mine, least, 2, MPI_LONG_LONG, MPI_MIN, world, &arrival);
    while (MPI_Test(&arrival, &here, MPI_STATUS_IGNORE) == MPI_SUCCESS && !here && waited < seconds) {
        waited = MPI_Wtime() - start;
        if (waited < 0.0002)
            sched_yield();
        else
            usleep(waited < 0.1 ? 50 : 1000);
    }
    if (!here && count)
        fprintf(stderr, "rank %d has waited %.0f s in an all-reduce (MPI) for the other ranks: they are late, have "
                "ended or run unequal numbers of steps\n", rank, seconds);
    else if (here && count && least[0] != -least[1])
        fprintf(stderr, "rank %d is in an all-reduce (MPI) of %zu numbers, another rank in one of %lld: they are out of "
                "step\n", rank, count, least[0] != mine[0] ? least[0] : -least[1]);
    return here && least[0] == -least[1];
}

static bool sum(const float *in, float *out, size_t count)
{
    for (size_t done = 0; done < count; done += PIECE) {
        int piece = (int)(count - done < PIECE ? count - done : PIECE);
        if (MPI_Allreduce(in == out ? MPI_IN_PLACE : in + done, out + done, piece, MPI_FLOAT, MPI_SUM, world))
            return false;
    }
    return true;
}

/* The first sum is computed both ways. Unless they agree on all ranks, MCCL computes all others, too. */
static bool try_both(void *self, const float *in, float *out, size_t count, const void *node, const struct group *group)
{
    float *mine = malloc(count * sizeof(float)), scale = 0, difference = 0;
    int equal = mine != NULL, all_equal = 0;
    if (mine)
        memcpy(mine, in, count * sizeof(float));
    bool done = mccl(self, in, out, count, SUM, node, group);
    MPI_Allreduce(&equal, &all_equal, 1, MPI_INT, MPI_MIN, world);
    if (all_equal && done) {
        for (size_t i = 0; i < count; i++)
            scale = fmaxf(scale, fabsf(mine[i]));
        MPI_Allreduce(MPI_IN_PLACE, &scale, 1, MPI_FLOAT, MPI_MAX, world); /* large numbers of others may cancel out */
        bool summed = sum(mine, mine, count);
        for (size_t i = 0; i < count; i++)
            if (!(mine[i] == out[i] || (isnan(mine[i]) && isnan(out[i])))) {
                scale = fmaxf(scale, fabsf(out[i]));
                difference = isfinite(mine[i] - out[i]) ? fmaxf(difference, fabsf(mine[i] - out[i])) : INFINITY;
            }
        equal = summed && isfinite(difference) && difference <= 1e-4F * scale;
        if (summed && !equal)
            fprintf(stderr, "warning: the first sum of rank %d by MindSpore and that by MPI differ: one of them is "
                    "wrong. All others are MindSpore's; look at the first losses\n", rank);
        MPI_Allreduce(&equal, &all_equal, 1, MPI_INT, MPI_MIN, world);
    }
    tried = true, trusted = all_equal;
    free(mine);
    return done;
}

static bool is_world(const struct group *group)
{
    if (group->size != (uint32_t)size || group->end - group->ranks != size)
        return false;
    for (int i = 0; i < size; i++)
        if (group->ranks[i] != (uint32_t)i)
            return false;
    return true;
}

static bool all_reduce(void *self, const void *in, void *out, size_t count, int operation, const void *node,
                       const struct group *group)
{
    if (operation != SUM || !is_world(group) || (tried && !trusted))
        return mccl(self, in, out, count, operation, node, group);
    pthread_mutex_lock(&one_at_a_time);
    bool done = all_are_here(count, patience);
    if (done && !tried)
        done = try_both(self, in, out, count, node, group);
    else if (done)
        done = sum(in, out, count);
    calls++;
    pthread_mutex_unlock(&one_at_a_time);
    return done;
}

/* MindSpore's ranks ask for each other's addresses 20 times at most, and sleep 3 s if one is not known yet, which some
 * rank must do nearly each time. So let a thread's first naps be short and later ones longer: 60 s in all, as before. */
static unsigned nap(unsigned seconds)
{
    static __thread int naps;
    naps++;
    return naps <= 8 ? usleep(150000), 0 : naps <= 12 ? sleep(1) : sleep(naps <= 20 ? 7 : seconds);
}

/* What to call in place of a function: all_reduce() for MCCL's, nap() for sleep(). */
static void *choose(const char *name, void *now)
{
    Dl_info found;
    if (strcmp(name, "sleep") == 0)
        return (void *)nap;
    if (strcmp(name, SYMBOL) != 0 || !dladdr(now, &found) || !found.dli_sname || strcmp(found.dli_sname, SYMBOL) != 0 ||
        (mccl && now != (void *)mccl))
        return NULL; /* another one, not resolved yet, or not what is known here: it stays */
    mccl = (all_reduce_t)now;
    slots++;
    return (void *)all_reduce;
}

/* Called by all ranks alike, after MindSpore was loaded; returns whether MPI sums from now on. */
bool take_over(int wanted_size, double seconds)
{
    int ready = 0, done, all_ready = 0;
    if (MPI_Initialized(&ready) || (!ready && MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &done)))
        return false;
    patience = seconds;
    owner = getpid();
    MPI_Comm_dup(MPI_COMM_WORLD, &world); /* messages of its own, apart from those of a script's mpi4py */
    MPI_Comm_set_errhandler(world, MPI_ERRORS_RETURN);
    MPI_Comm_size(world, &size);
    MPI_Comm_rank(world, &rank);
    MPI_Query_thread(&ready);
    bool all_put = look_at_calls(choose);
    ready = all_put && ready >= MPI_THREAD_SERIALIZED && size == wanted_size && slots > 0;
    MPI_Allreduce(&ready, &all_ready, 1, MPI_INT, MPI_MIN, world);
    tried = !all_ready; /* and not trusted */
    return all_ready;
}

/* End MPI together with the other ranks, if they come in time: mpirun calls it a failure if one ends without. */
void finish(double seconds)
{
    int begun = 0, over = 1;
    if (getpid() == owner && !MPI_Initialized(&begun) && begun && !MPI_Finalized(&over) && !over &&
        all_are_here(0, seconds))
        MPI_Finalize();
}

/* How many sums were MPI's, for tests; -1: not one, for MCCL's and MPI's first differed. */
int sums(void)
{
    return trusted ? calls : -tried;
}
