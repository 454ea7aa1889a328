/** The owner of an incident: the person who takes care of it. */
import { Button, TextInput } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { useState } from 'react'

import { call } from '../api/client'
import { sessionQuery, useRole } from '../api/queries'
import type { Incident } from '../contract'
import { DIALOGS } from '../words/dialogs'
import { INCIDENT } from '../words/incident'
import { ActionButton } from './ActionButton'

const WORDS = INCIDENT.people
const MAX_CHARACTERS = 256

export function Owner({ incident }: { incident: Pick<Incident, 'IncidentId' | 'Owner'> }) {
  const { mayRun } = useRole()
  const me = useQuery(sessionQuery).data
  const [draft, setDraft] = useState<string>()
  const set = (owner: string) =>
    call('UpdateIncident', { IncidentId: incident.IncidentId, Owner: owner }).then(() => setDraft(undefined))
  if (draft !== undefined) {
    return (
      <div className="row">
        <TextInput
          size="xs"
          aria-label={WORDS.owner}
          value={draft}
          maxLength={MAX_CHARACTERS}
          onChange={(event) => setDraft(event.currentTarget.value)}
        />
        <ActionButton operation="UpdateIncident" action={() => set(draft)}>
          {WORDS.save}
        </ActionButton>
        <Button size="xs" variant="subtle" onClick={() => setDraft(undefined)}>
          {DIALOGS.cancel}
        </Button>
      </div>
    )
  }
  return (
    <div className="row">
      <span className="dim">{WORDS.owner}</span>
      <strong>{incident.Owner ?? WORDS.nobody}</strong>
      {mayRun && (
        <>
          {me && incident.Owner === undefined && (
            <ActionButton operation="UpdateIncident" action={() => set(me.Description || me.TokenId)}>
              {WORDS.take}
            </ActionButton>
          )}
          <Button size="xs" variant="default" onClick={() => setDraft(incident.Owner ?? '')}>
            {WORDS.change}
          </Button>
          {incident.Owner !== undefined && (
            <ActionButton operation="UpdateIncident" action={() => set('')}>
              {WORDS.clear}
            </ActionButton>
          )}
        </>
      )}
    </div>
  )
}
