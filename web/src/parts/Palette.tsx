/** The command palette: everything that has a name, and every page, by typing. */
import { Modal, TextInput } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { useEffect, useMemo, useState } from 'react'
import { useNavigate } from 'react-router'

import { fleetsQuery, incidentsQuery, jobsQuery, useRole } from '../api/queries'
import { causeWords } from '../model/verdict'

interface Entry {
  label: string
  kind: string
  to: string
}
const MOST = 12

interface Sought {
  typed: string
  /** Enter was pressed before this was there: what is found first is opened, as soon as something is. */
  isEntered: boolean
  onType: (text: string) => void
  onClose: () => void
}

export default function Palette({ typed, isEntered, onType, onClose }: Sought) {
  const navigate = useNavigate()
  const [chosen, setChosen] = useState(0)
  const { mayRun } = useRole()
  const jobs = useQuery({ ...jobsQuery, refetchInterval: false }).data
  const incidents = useQuery({ ...incidentsQuery(), refetchInterval: false }).data
  const fleets = useQuery({ ...fleetsQuery, refetchInterval: false }).data
  const entries = useMemo<Entry[]>(
    () => [
      { label: 'Jobs', kind: 'page', to: '/' },
      { label: 'Queue', kind: 'page', to: '/queue' },
      { label: 'Incidents', kind: 'page', to: '/incidents' },
      { label: 'Fleets', kind: 'page', to: '/fleets' },
      { label: 'Drills', kind: 'page', to: '/drills' },
      ...(mayRun ? [{ label: 'Submit a job', kind: 'page', to: '/submit' }] : []),
      { label: 'Settings', kind: 'page', to: '/settings' },
      ...(jobs ?? []).map((job) => ({ label: job.TrainingJobName, kind: `job, ${job.SecondaryStatus}`, to: `/jobs/${encodeURIComponent(job.TrainingJobName)}` })),
      ...(fleets ?? []).map((fleet) => ({ label: fleet.FleetName, kind: 'fleet', to: `/fleets/${encodeURIComponent(fleet.FleetName)}` })),
      ...(incidents ?? []).toReversed().map((each) => ({ label: each.IncidentId, kind: `incident, ${causeWords(each.Cause)}`, to: `/incidents/${encodeURIComponent(each.IncidentId)}` })),
    ],
    [jobs, incidents, fleets, mayRun],
  )
  const wanted = typed.toLowerCase().split(/\s+/).filter(Boolean)
  const found = entries.filter((entry) => wanted.every((word) => `${entry.label} ${entry.kind}`.toLowerCase().includes(word))).slice(0, MOST)
  const index = Math.min(chosen, Math.max(0, found.length - 1))
  const go = (entry?: Entry) => {
    if (!entry) return
    onClose()
    void navigate(entry.to)
  }
  useEffect(() => {
    if (isEntered) go(found[index])
  })
  return (
    <Modal opened onClose={onClose} withCloseButton={false} padding="xs" yOffset="12vh" attributes={{ content: { 'aria-label': 'Search and go to' } }}>
      <TextInput
        aria-label="Search and go to"
        placeholder="A job, an incident, a fleet, a page"
        value={typed}
        data-autofocus
        role="combobox"
        aria-expanded="true"
        aria-controls="palette"
        aria-activedescendant={found.length ? `palette-${index}` : undefined}
        onChange={(event) => {
          onType(event.currentTarget.value)
          setChosen(0)
        }}
        onKeyDown={(event) => {
          const move = event.key === 'ArrowDown' ? 1 : event.key === 'ArrowUp' ? -1 : 0
          if (move) {
            event.preventDefault()
            setChosen((index + move + found.length) % Math.max(1, found.length))
          } else if (event.key === 'Enter') {
            event.preventDefault() // what has the focus once this is closed would take the key for its own
            go(found[index])
          }
        }}
      />
      <ul className="palette" id="palette" role="listbox" aria-label="Found">
        {found.map((entry, each) => (
          <li key={entry.to} id={`palette-${each}`} role="option" aria-selected={each === index} onClick={() => go(entry)} onPointerMove={() => setChosen(each)}>
            <span>{entry.label}</span>
            <span className="dim">{entry.kind}</span>
          </li>
        ))}
        {!found.length && <li className="dim">Nothing has this in its name.</li>}
      </ul>
    </Modal>
  )
}
