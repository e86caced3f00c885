/* A preloaded library with a dlsym of its own, as in tracers and overlays. By default it finds the next dlsym as they do, by
   dlvsym; with OWN_WAY it goes to the C library's, past every library between. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdlib.h>
#include <string.h>

typedef void *(*Find)(void *, const char *);

/* By the C library's own symbol table, with its strings behind its symbols. */
static Find from_the_c_library(void) {
    struct link_map *library = dlopen("libc.so.6", RTLD_NOW);
    const ElfW(Sym) *symbols = 0;
    const char *strings = 0;
    for (ElfW(Dyn) *entry = library->l_ld; entry->d_tag; entry++) {
        if (entry->d_tag == DT_SYMTAB) symbols = (void *)entry->d_un.d_ptr;
        if (entry->d_tag == DT_STRTAB) strings = (void *)entry->d_un.d_ptr;
    }
    for (; (const char *)symbols < strings; symbols++)
        if (symbols->st_shndx && !strcmp(strings + symbols->st_name, "dlsym")) return (Find)(library->l_addr + symbols->st_value);
    return 0;
}

void *dlsym(void *handle, const char *name) {
    static Find real;
    if (!real) real = getenv("OWN_WAY") ? from_the_c_library() : (Find)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    return real ? real(handle, name) : 0;
}
