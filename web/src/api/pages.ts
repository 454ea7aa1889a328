/** Parts of the application that are loaded when they are opened, through restarts of the server and after an update. */
import { lazy, type ComponentType, type LazyExoticComponent } from 'react'

/** What a load needs of the browser. */
export interface Browser {
  /** Resolves once the server answers. */
  answers: () => Promise<void>
  /** Loads the whole application anew; false where that was tried a moment ago and did not help. */
  reload: () => boolean
}

type Load<T> = () => Promise<T>

/**
 * Load a part of the application.
 *
 * A server that is away is waited for. Where it answers and still does not have the part, an update has replaced the files of this application: it is
 * loaded anew. A part that a new application cannot load either is an error.
 */
export async function loaded<T>(load: Load<T>, browser: Browser = here): Promise<T> {
  try {
    return await load()
  } catch {
    await browser.answers()
  }
  try {
    return await load()
  } catch (error) {
    if (!browser.reload()) throw error
    return new Promise<never>(() => undefined) // the page goes
  }
}

const LOOK_MS = 2_000
const AGAIN_MS = 60_000
const RELOADED = 'everstep-reloaded-at'

const here: Browser = {
  answers: async () => {
    for (;;) {
      try {
        if ((await fetch('/v1/health', { cache: 'no-store' })).status < 500) return
      } catch {
        // nobody answers yet
      }
      await new Promise((done) => setTimeout(done, LOOK_MS))
    }
  },
  reload: () => {
    const before = Number(sessionStorage.getItem(RELOADED) ?? 0)
    if (Date.now() - before < AGAIN_MS) return false
    sessionStorage.setItem(RELOADED, String(Date.now()))
    window.location.reload()
    return true
  },
}

const ahead: Load<unknown>[] = []

/** A component in a file of its own, as React's `lazy`; `loadAhead` fetches it before it is opened. */
export function part<P>(load: Load<{ default: ComponentType<P> }>): LazyExoticComponent<ComponentType<P>> {
  ahead.push(load)
  return lazy(() => loaded(load))
}

/** Fetch every part while the browser has nothing else to do: a page opens although the server is away. What fails is loaded when it is opened. */
export async function loadAhead(): Promise<void> {
  for (const load of ahead) await load().catch(() => undefined)
}
