/* Puts own functions where the dynamic linker has put those that MindSpore's libraries call. */
#ifndef LINKER_TABLE_H
#define LINKER_TABLE_H
#include <link.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Called for each entry; returns the function to put there, or NULL to leave it. */
typedef void *(*choose_t)(const char *name, void *now);

static bool all_were_put; /* in the table, of what was chosen */

static void look_at_entries(ElfW(Addr) base, const ElfW(Rela) *entry, size_t bytes, const ElfW(Sym) *symbols,
                            const char *names, choose_t choose)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (size_t i = 0; entry && i < bytes / sizeof(*entry); i++) {
        if (entry[i].r_info >> 32 == 0)
            continue; /* no name */
        void **slot = (void **)(base + entry[i].r_offset);
        void *chosen = choose(names + symbols[entry[i].r_info >> 32].st_name, *slot);
        void *begin = (void *)((size_t)slot / page * page);
        if (!chosen)
            continue;
        if (mprotect(begin, page, PROT_READ | PROT_WRITE)) {
            all_were_put = false;
            continue;
        }
        *slot = chosen;
        mprotect(begin, page, PROT_READ); /* as the linker has left it */
    }
}

static int look_at_library(struct dl_phdr_info *library, size_t unused, void *choose)
{
    const char *file = strrchr(library->dlpi_name, '/'); /* not the path: any folder may be called mindspore */
    (void)unused;
    for (int i = 0; file && strncmp(file, "/libmindspore_", 14) == 0 && i < library->dlpi_phnum; i++) {
        if (library->dlpi_phdr[i].p_type != PT_DYNAMIC)
            continue;
        const ElfW(Sym) *symbols = NULL;
        const char *names = NULL;
        const ElfW(Rela) *calls = NULL, *others = NULL;
        size_t calls_size = 0, others_size = 0;
        for (ElfW(Dyn) *entry = (void *)(library->dlpi_addr + library->dlpi_phdr[i].p_vaddr); entry->d_tag; entry++)
            switch (entry->d_tag) { /* glibc has made these into addresses */
            case DT_SYMTAB: symbols = (void *)entry->d_un.d_ptr; break;
            case DT_STRTAB: names = (void *)entry->d_un.d_ptr; break;
            case DT_JMPREL: calls = (void *)entry->d_un.d_ptr; break;
            case DT_PLTRELSZ: calls_size = entry->d_un.d_val; break;
            case DT_RELA: others = (void *)entry->d_un.d_ptr; break;
            case DT_RELASZ: others_size = entry->d_un.d_val; break;
            }
        if (symbols && names) {
            look_at_entries(library->dlpi_addr, calls, calls_size, symbols, names, *(choose_t *)choose);
            look_at_entries(library->dlpi_addr, others, others_size, symbols, names, *(choose_t *)choose);
        }
    }
    return 0;
}

/* Look at all of MindSpore's libraries that are loaded; returns whether all that was chosen was put there. */
static bool look_at_calls(choose_t choose)
{
    all_were_put = true;
    dl_iterate_phdr(look_at_library, &choose);
    return all_were_put;
}
#endif
