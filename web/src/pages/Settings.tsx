/** Who is signed in, how it looks, which versions run. */
import { SegmentedControl, useMantineColorScheme } from '@mantine/core'
import { useDocumentTitle } from '@mantine/hooks'
import { useQuery } from '@tanstack/react-query'

import { sessionQuery } from '../api/queries'
import { utc } from '../model/format'
import { Ago, FactList, Shown } from '../parts/Basics'

const MAY: Record<string, string> = { admin: 'everything, in every project', user: 'run and stop jobs of its project; read fleets', reader: 'read' }
const KEYS = [['⌘K or Ctrl K', 'search and go to'], ['g then j, q, i, f, s', 'jobs, queue, incidents, fleets, submit'], ['/', 'filter']]

export default function SettingsPage() {
  useDocumentTitle('Settings, Everstep')
  const query = useQuery(sessionQuery)
  const { colorScheme, setColorScheme } = useMantineColorScheme()
  return (
    <div className="stack">
      <h1>Settings</h1>
      <section className="card">
        <h2>Session</h2>
        <Shown query={query} rows={2}>
          {(session) => session && (
            <FactList
              facts={[
                ['Role', `${session.Role}: may ${MAY[session.Role] ?? 'what the server allows'}`],
                ['Project', session.Project || 'all'],
                ['Token', <span key="token"><code>{session.TokenId}</code> {session.Description}</span>],
                ['Session ends', <span key="ends"><Ago at={session.ExpiresAt} />, {utc(session.ExpiresAt)}</span>],
                ['Server', `Everstep ${session.Version}`],
              ]}
            />
          )}
        </Shown>
        <p className="dim" style={{ marginTop: 12 }}>Tokens of people are not listed or made over the API yet.</p>
      </section>
      <section className="card">
        <h2>Theme</h2>
        <SegmentedControl aria-label="Theme" value={colorScheme} onChange={(value) => setColorScheme(value as 'auto')} data={[{ value: 'auto', label: 'As the system' }, { value: 'light', label: 'Light' }, { value: 'dark', label: 'Dark' }]} />
      </section>
      <section className="card">
        <h2>Keys</h2>
        <FactList facts={KEYS.map(([key, what]) => [key!, what])} />
      </section>
    </div>
  )
}
