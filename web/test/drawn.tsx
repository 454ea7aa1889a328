/** Renders a part of a page with the application's theme, queries and addresses. Tests set the answers of the API. */
import { MantineProvider } from '@mantine/core'
import { QueryClient, QueryClientProvider } from '@tanstack/react-query'
import { cleanup, render } from '@testing-library/react'
import type { ReactNode } from 'react'
import { MemoryRouter } from 'react-router'
import { afterEach, beforeEach, vi } from 'vitest'

import { contact } from '../src/api/client'

afterEach(cleanup)
// Without answers of its own, a test has a server that knows nothing. A missing server would turn actions off.
beforeEach(() => {
  Object.assign(contact, { at: Date.now(), isMissed: false })
  served({})
})

// Replace browser functions that Mantine calls and jsdom lacks.
window.matchMedia ??= (query) => ({
  matches: false,
  media: query,
  onchange: null,
  addListener() {},
  removeListener() {},
  addEventListener() {},
  removeEventListener() {},
  dispatchEvent: () => false,
})
window.ResizeObserver ??= class {
  observe() {}
  unobserve() {}
  disconnect() {}
}
if (!document.fonts) Object.defineProperty(document, 'fonts', { value: new EventTarget() })

export function drawn(
  what: ReactNode,
  { role = 'admin', answers = {}, at = '/' }: { role?: string; answers?: Record<string, unknown>; at?: string } = {},
) {
  const client = new QueryClient({
    defaultOptions: { queries: { retry: false, staleTime: Infinity, refetchInterval: false } },
  })
  client.setQueryData(['session'], { Role: role })
  for (const [key, answer] of Object.entries(answers)) client.setQueryData(JSON.parse(key) as string[], answer)
  const page = render(
    <MantineProvider env="test">
      <QueryClientProvider client={client}>
        <MemoryRouter initialEntries={[at]}>{what}</MemoryRouter>
      </QueryClientProvider>
    </MantineProvider>,
  )
  return { ...page, client }
}

/** Answer requests from a table of answers by path, and others with 404. Return the list of requests, in order. */
export function served(
  table: Record<string, { status?: number; body: unknown }>,
): { method: string; path: string; body: unknown }[] {
  const asked: { method: string; path: string; body: unknown }[] = []
  vi.stubGlobal('fetch', (url: string, init: RequestInit) => {
    const path = url.split('?')[0]!
    asked.push({
      method: init.method ?? 'GET',
      path,
      body: init.body === undefined ? undefined : JSON.parse(init.body as string),
    })
    const answer = table[path] ?? {
      status: 404,
      body: { Code: 'ResourceNotFoundException', Message: `${path} is not in the test's table` },
    }
    return Promise.resolve(
      new Response(JSON.stringify(answer.body), {
        status: answer.status ?? 200,
        headers: { 'x-amzn-requestid': 'req-1' },
      }),
    )
  })
  return asked
}
afterEach(() => vi.unstubAllGlobals())
